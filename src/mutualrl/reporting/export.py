"""Export of a run's trained models to standalone directories: weights, tokenizer, card, licence, checksums."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutualrl.console.plots import directory_for
from mutualrl.engines.model_files import require_finite
from mutualrl.errors import ModelError, UsageError
from mutualrl.reporting.card import CARD, card
from mutualrl.runs.read import read_run
from mutualrl.runs.record import policies_in
from mutualrl.storage.artifacts import relative_files, sha256_of
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import has_trained_model, trained_model
from mutualrl.tiny import resolve_path

SUMS = "SHA256SUMS"
LICENSES = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Exported:
    """One exported model. `licenses`: the base model's licence files; empty if none are available locally."""

    policy: str
    directory: Path
    files: tuple[str, ...]
    licenses: tuple[str, ...]


def export(root: Path, to: Path, policies: Sequence[str] = ()) -> list[Exported]:
    """Copy trained models to `to`/POLICY: those of `policies`, or all if empty.

    Every file is first verified against the run's marker, and weights must be finite. A directory is created atomically
    and never overwritten. Raises UsageError, FileDamagedError, ModelError, DiskError.
    """
    reader = read_run(root)
    run = RunDirectory(reader.root)
    unknown = [name for name in policies if name not in reader.policies]
    if unknown:
        raise UsageError(f"--policy {unknown[0]}: the run has {', '.join(reader.policies)}")
    names = list(dict.fromkeys(policies)) or [name for name in reader.policies if has_trained_model(run, name)]
    if not names:
        raise UsageError(f"{root} has no trained model to export (did it finish?)")
    sources = {name: _checked(run, name) for name in names}
    revisions = {policy["name"]: policy.get("revision") for policy in policies_in(reader.recipe)}
    licenses = {name: license_files(reader.policies[name].model, revisions.get(name)) for name in names}
    for name in names:
        if (to / name).exists():
            raise UsageError(f"{to / name} already exists; choose another directory or remove it")
    directory_for(to, "--to")
    exported = []
    for name in names:
        text = card(reader, reader.policies[name])
        with _staged(name, to) as staging:
            _copy(text, licenses[name], sources[name], staging)
            files = _with_sums(staging)
        exported.append(Exported(name, to / name, files, tuple(path.name for path in licenses[name])))
    return exported


def _checked(run: RunDirectory, policy: str) -> Path:
    """Return the verified directory of a policy's model. Raises FileDamagedError, and ModelError for links and special
    files: copying them would read outside the run or block."""
    directory = run.policy(policy).model
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ModelError(f"{path}: not a regular file; expected a file that the run wrote")
    source = trained_model(run, policy, verify=True)
    require_finite(source)
    return source


@contextmanager
def _staged(name: str, to: Path) -> Iterator[Path]:
    """Yield a directory that is renamed to `to`/NAME if the block succeeds, else removed."""
    staging = to / f".{name}.part"
    shutil.rmtree(staging, ignore_errors=True)  # left by a killed export
    try:
        staging.mkdir()
        yield staging
        staging.rename(to / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _with_sums(staging: Path) -> tuple[str, ...]:
    """Write the checksums of all files; return the files, with the checksum file last."""
    files = sorted(relative_files(staging))
    sums = "".join(f"{sha256_of(staging / file)}  {file}\n" for file in files)
    (staging / SUMS).write_text(sums, encoding="utf-8")
    return (*files, SUMS)


def _copy(text: str, licenses: Sequence[Path], source: Path, staging: Path) -> None:
    for file in relative_files(source):
        if file != CARD:
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, staging / file)
    (staging / CARD).write_text(text, encoding="utf-8")
    for path in licenses:
        shutil.copyfile(path, staging / path.name)


def license_files(base: str, revision: str | None = None) -> list[Path]:
    """Return a base model's licence files, from its directory or the hub cache; empty if neither exists."""
    if not base:
        return []
    directory = Path(resolve_path(base))
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(base, "config.json", revision=revision)
        except HFValidationError:  # a directory that no longer exists
            return []
        if not isinstance(config, str):
            return []
        directory = Path(config).parent
    return sorted(path for path in directory.iterdir() if path.is_file() and LICENSES.match(path.name))
