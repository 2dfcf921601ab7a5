"""Run directory: layout and claim. Run directories contain data only: JSON, YAML, Parquet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from mutualrl.errors import (
    DirectoryTakenError,
    DiskError,
    FileDamagedError,
    MachineError,
    RunDirectoryError,
    UsageError,
)
from mutualrl.storage.files import JsonObject, read_checksummed, read_json, write_atomic, write_checksummed
from mutualrl.storage.format import other_format
from mutualrl.storage.run_info import RunInfo

_INTERNAL_FILES = re.compile(r"\.node-[0-9]+\.lock|\..*\.tmp")  # locks, and temporary files of killed writers
PACKAGES = ("mutualrl", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "vllm")


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """Paths of one policy's results."""

    root: Path

    @property
    def run(self) -> Path:
        """Return the directory of its run."""
        return self.root.parents[1]

    @property
    def metrics(self) -> Path:
        """Return the path of the file with one JSON line per optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def rescues(self) -> Path:
        """Return the path of the file with one JSON line per rescue pair that the policy trained on."""
        return self.root / "rescues.jsonl"

    @property
    def samples(self) -> Path:
        """Return the path of the file with one JSON line per round: some of its rollouts."""
        return self.root / "samples.jsonl"

    @property
    def logs(self) -> Path:
        """Return the directory of the processes' output."""
        return self.root / "logs"

    @property
    def model(self) -> Path:
        """Return the directory of the trained model, as save_pretrained writes it."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """Return the directory of the trained adapter, if the policy trained one."""
        return self.root / "adapter"

    @property
    def before(self) -> Path:
        """Return the path of the validation before the first step."""
        return self.root / "before.json"

    @property
    def result(self) -> Path:
        """Return the path of the policy's final report."""
        return self.root / "result.json"

    @property
    def prompts(self) -> Path:
        """Return the path of the numbers of prompts by split, and of those left out as too long."""
        return self.root / "prompts.json"

    @property
    def lock(self) -> Path:
        """Return the path of the lock that the policy's own script holds while it trains."""
        return self.root / ".script.lock"

    @property
    def failure(self) -> Path:
        """Return the path of the policy's error, if it could write one."""
        return self.root / "failure.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of a run."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Return the path of run.json (versions, seed, fingerprint), the first file of a run."""
        return self.root / "run.json"

    @property
    def recipe(self) -> Path:
        """Return the path of the resolved recipe."""
        return self.root / "recipe.yaml"

    def recipe_text(self) -> str:
        """Return the run's recipe from run.json. Raises as `info` does, and UsageError for a run of scripts."""
        info = self.info()
        if info.scripts:
            raise UsageError(
                f"{self.root}: its policies were trained by scripts (Sharing.over) and have no recipe, which this "
                "command needs; report, watch, runs, and exchange ls, show and export read such a run"
            )
        return info.recipe

    @property
    def exchange(self) -> Path:
        """Return the directory of the run's Shared Experience Exchange."""
        return self.root / "exchange"

    def source(self, name: str) -> Path:
        """Return the path of a source's rollouts, as they were verified before training."""
        return self.root / "sources" / f"{name}.parquet"

    @property
    def stop_file(self) -> Path:
        """Return the path of the stop request: the workers save a checkpoint and exit."""
        return self.root / "supervisor" / "stop.json"

    @property
    def summary(self) -> Path:
        """Return the path of the run's results."""
        return self.root / "summary.json"

    @property
    def evaluations(self) -> Path:
        """Return the directory of the models' evaluations, one file per suite."""
        return self.root / "evaluations"

    def require_present(self) -> None:
        """Raise MachineError if the run's directory no longer exists: writing would make one of its name anew."""
        if not self.run_json.exists():
            raise directory_is_gone(self.root)

    def policy(self, name: str) -> PolicyFiles:
        """Return the paths of one policy, or of a source that is asked, which has a directory of its own."""
        source = self.asked_source(name)
        return PolicyFiles(source if source.is_dir() else self.root / "policies" / name)

    def asked_source(self, name: str) -> Path:
        """Return the directory of a source with a process of its own."""
        return self.root / "sources" / name

    @property
    def lock(self) -> Path:
        """Return the path of the lock that the run's supervisor holds."""
        return self.root / ".node-0.lock"

    def info(self) -> RunInfo:
        """Return the content of run.json. Raises UsageError if the directory is not a run or has another format,
        FileDamagedError if the file was changed."""
        try:
            value = read_run_json(self.run_json)
        except OSError as error:
            raise UsageError(f"{self.run_json}: cannot be read ({error}); --clean deletes the run") from None
        except FileDamagedError as error:
            raise FileDamagedError(f"{error}; restore it, or delete the run with --clean") from None
        if value is None:
            raise UsageError(f"{self.root} is not a run directory: it has no run.json")
        if not isinstance(value.get("run_id"), str):
            raise UsageError(f"{self.run_json}: not of a run (it has no run_id)")
        try:
            return RunInfo.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{self.run_json}: {where}: {first['msg']}, found {first['input']!r:.80}") from None


def directory_is_gone(root: Path) -> MachineError:
    """Return the error for a run's directory that was renamed or removed."""
    return MachineError(
        f"the run directory {root} is gone: it was renamed or removed while the run used it; the policies are stopped. "
        "Move it back, and resume with: mutualrl train --resume --run-dir DIR"
    )


#: paths in a run's directory, as patterns, that must be directories or, without a slash at the end, regular files
KINDS = (
    *("run.json", "recipe.yaml", "summary.json", ".node-0.lock", "supervisor/*.json", "evaluations/*.json"),
    *("exchange/", "policies/", "sources/", "supervisor/", "evaluations/", "report/", "policies/[!.]*/"),
    "sources/*.parquet",
    "exchange/*/heartbeat*.json",
    *("policies/*/*.json", "policies/*/*.jsonl", "policies/*/logs/*.log"),
    *(f"policies/*/{name}/" for name in ("logs", "model", "adapter", "checkpoints", "trainer")),
    *("policies/*/checkpoints/latest.json", "policies/*/checkpoints/step-*/"),
    "policies/*/checkpoints/step-*/complete.json",
)


def wrong_kinds(run: RunDirectory) -> list[str]:
    """Return messages about paths of a run that are of another kind than expected, such as a directory where a file
    was, or a directory that is a link: what is behind it is not of the run."""
    problems = []
    inside = run.root.resolve()
    for directory in sorted((*run.root.glob("*"), *run.root.glob("policies/*"), *run.root.glob("exchange/*"))):
        if directory.is_symlink() and (problem := _link_problem(directory, inside)):
            problems.append(f"{directory}: found a link {problem}, expected a directory of its own; restore it")
    for pattern in KINDS:
        expected = "directory" if pattern.endswith("/") else "file"
        for path in sorted(run.root.glob(pattern.rstrip("/"))):
            actual = "directory" if path.is_dir() else "file" if path.is_file() else "FIFO, device or socket"
            if actual != expected:
                problems.append(f"{path}: found a {actual}, expected a {expected}; restore it")
    return problems


def _link_problem(link: Path, inside: Path) -> str:
    """Return what is wrong with a link of a run; empty if it leads to a place in the run."""
    try:
        return "" if link.resolve().is_relative_to(inside) else "out of the run"
    except (OSError, RuntimeError):  # a RuntimeError of pathlib for a loop
        return "to itself"


def read_run_json(path: Path) -> JsonObject | None:
    """Return the content of a run.json, its checksum verified, or None if the file does not exist. Raises UsageError
    for one of another format, FileDamagedError, OSError."""
    value = read_json(path)
    if value is not None and "run_id" in value and (problem := other_format(value.get("format"), path)) is not None:
        raise UsageError(f"{problem}, or name another directory with --run-dir")
    return read_checksummed(path, root=path.parent)


def default_path(regime: str, pool: str) -> Path:
    """Return an unused path under `runs/`, named after regime, pool and time."""
    stem = Path("runs") / f"{regime}-{pool}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def check_free(path: Path) -> None:
    """Raise RunDirectoryError unless `path` does not exist, or is a directory with internal files only."""
    if path.is_symlink():
        raise RunDirectoryError(f"run directory {path} is a symbolic link; name the directory itself with --run-dir")
    if path.is_dir() and all(_INTERNAL_FILES.fullmatch(p.name) for p in path.iterdir()):
        return
    if (path / "run.json").exists():
        raise DirectoryTakenError(
            f"run directory {path} already holds a run ({_run_state(path)}); resume it with --resume, delete it with "
            "--clean, or name another with --run-dir"
        )
    if path.exists():
        raise DirectoryTakenError(
            f"run directory {path} already exists and is not empty, and is not a mutualrl run: name another with "
            "--run-dir (or omit it for a new one under runs/); --resume and --clean only accept runs"
        )


def require_creatable(path: Path, *, clean: bool = False) -> None:
    """Raise RunDirectoryError if a run cannot be created in `path`: it is taken (with `clean`: by anything but a run
    that can be deleted), or its parents do not allow it."""
    if not clean:
        check_free(path)
    elif path.exists() or path.is_symlink():
        _require_cleanable(path)
    existing = next((parent for parent in (path, *path.parents) if parent.exists()), Path(path.anchor or "."))
    problem = None
    if not existing.is_dir():
        problem = f"{existing} is not a directory"
    else:
        try:  # permissions do not tell: root may not write to /proc
            tempfile.TemporaryDirectory(dir=existing, prefix=".mutualrl-", suffix=".tmp").cleanup()
        except OSError as error:
            problem = f"{existing} is not writable ({error.strerror or error})"
    if problem is not None:
        raise RunDirectoryError(f"run directory {path} cannot be written: {problem}; name another with --run-dir")


def _run_state(path: Path) -> str:
    run = RunDirectory(path)
    if (holder := holder_of(run.lock)) is not None:
        return f"it is running now: {holder}"
    return "finished" if run.summary.exists() else "not finished"


#: everything that a run creates in its directory; run.json is removed last, so that a partly removed run is recognized
CONTENT = (
    "exchange",
    "policies",
    "sources",
    "supervisor",
    "warm-up",
    "report",
    "evaluations",
    "recipe.yaml",
    "summary.json",
    "run.json",
)


def clean_run(path: Path, held: ExitStack) -> None:
    """Remove the run in `path` and hold its lock while `held` is open. Raises RunDirectoryError, with nothing removed,
    if the directory is a link, is not a run, has other files, or the run is running."""
    if not path.exists() and not path.is_symlink():
        return
    _require_cleanable(path)
    held.enter_context(hold(RunDirectory(path).lock, f"{path}"))
    for name in CONTENT:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _require_cleanable(path: Path) -> None:
    """Raise RunDirectoryError unless a directory has a run's files only."""
    run = RunDirectory(path)
    if path.is_symlink() or not path.is_dir():
        raise RunDirectoryError(f"--clean: {path} is not a run directory; nothing was removed")
    names = {p.name for p in path.iterdir()}
    unknown = sorted(name for name in names if name not in CONTENT and not _INTERNAL_FILES.fullmatch(name))
    if not run.run_json.is_file() and names - {p for p in names if _INTERNAL_FILES.fullmatch(p)}:
        raise RunDirectoryError(f"--clean: {path} is not a run directory; nothing was removed")
    if unknown:
        raise RunDirectoryError(
            f"--clean: {path} holds files that are not the run's ({', '.join(unknown[:5])}); nothing was removed: move "
            "them, or name another directory with --run-dir"
        )
    if run.run_json.exists():  # else cut off by a kill, with nothing to protect
        with contextlib.suppress(FileDamagedError):  # changed since; the directory has a run's files only
            run.info()


@contextmanager
def hold(lock: Path, what: str) -> Iterator[None]:
    """Hold a supervisor's lock, which the operating system releases when the process ends. Re-entrant within a process.
    Lock files are never removed: another process might hold the removed one.

    Raises RunDirectoryError if another process holds it (for longer than `holder_of` takes).
    """
    key = str(lock.absolute())
    if key in _HELD_LOCKS:
        yield
        return
    with lock.open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DirectoryTakenError(
                        f"run directory {what} is in use: {holder_of(lock) or 'another process'}; wait for it, stop it "
                        "(Ctrl-C there), or name another with --run-dir"
                    ) from None
                time.sleep(0.02)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        _HELD_LOCKS.add(key)
        try:
            yield
        finally:
            _HELD_LOCKS.discard(key)


_HELD_LOCKS: set[str] = set()
_LOCK_SECONDS = 0.3


def holder_of(lock: Path) -> str | None:
    """Return the holder of a supervisor's lock, as text, or None if it is free."""
    try:
        with lock.open("r", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(200) or "another process"
            return None
    except FileNotFoundError:
        return None


def create(path: Path, info: RunInfo, held: ExitStack) -> RunDirectory:
    """Claim `path` for a run: create it, hold its lock while `held` is open, and write run.json, then its recipe.

    Raises RunDirectoryError if it is taken (even by a run that starts at the same time) or not writable.
    """
    run = RunDirectory(path.expanduser().absolute())
    check_free(run.root)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        held.enter_context(hold(run.lock, str(path)))
        check_free(run.root)  # the previous holder of the lock may have created a run
        write_checksummed(run.run_json, info.to_json(), root=run.root)
        write_atomic(run.recipe, info.recipe.encode())
    except (OSError, DiskError) as error:
        raise RunDirectoryError(
            f"run directory {path} cannot be written: {getattr(error, 'strerror', None) or error}; name another with "
            "--run-dir"
        ) from None
    return run


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect a run's results, and the `checkout` of
    mutualrl's own code, where it is run from one."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    own = checkout(Path(__file__))
    return installed if own is None else {**installed, "checkout": own}


def checkout(file: Path) -> str | None:
    """Return the commit of the git checkout that a file is tracked in, followed by `+changed` where tracked files
    outside `benchmarks/results` differ from it; None where there is none, or no git."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=True, timeout=60).stdout

    try:
        git("ls-files", "--error-unmatch", file.name)  # else the repository of a user whose environment lies in it
        commit = git("rev-parse", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changed" if changed else commit


def command_line() -> list[str]:
    """Return the command as typed, the program without its path; `python -m mutualrl` is `mutualrl`."""
    name = Path(sys.argv[0]).name
    return ["mutualrl" if name == "__main__.py" else name, *sys.argv[1:]]
