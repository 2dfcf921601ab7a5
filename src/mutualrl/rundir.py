"""A run's directory: what lies where, and how it is claimed. Run directories are data: JSON, YAML, Parquet."""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mutualrl.errors import RunDirectoryError, UsageError
from mutualrl.files import read_json

PACKAGES = ("mutualrl", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "vllm")


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """Where one policy's results lie."""

    root: Path

    @property
    def metrics(self) -> Path:
        """One JSON line for every optimizer step."""
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Directory of the processes' output."""
        return self.root / "logs"

    @property
    def model(self) -> Path:
        """The trained model, as save_pretrained writes it."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The trained adapter, where the policy trained one."""
        return self.root / "adapter"

    @property
    def result(self) -> Path:
        """What the policy reports at its end."""
        return self.root / "result.json"

    @property
    def failure(self) -> Path:
        """Why the policy failed, when it could still say so."""
        return self.root / "failure.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Versions, seed and fingerprint; created first, exclusively."""
        return self.root / "run.json"

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.root / "recipe.yaml"

    @property
    def exchange(self) -> Path:
        """The Shared Experience Exchange of the run."""
        return self.root / "exchange"

    @property
    def summary(self) -> Path:
        """The run's results."""
        return self.root / "summary.json"

    def policy(self, name: str) -> PolicyFiles:
        """The files of one policy."""
        return PolicyFiles(self.root / "policies" / name)

    def info(self) -> dict[str, Any]:
        """The content of run.json. Raises UsageError when the directory is not a run's."""
        try:
            value = read_json(self.run_json)
        except (ValueError, OSError, RecursionError) as error:
            raise UsageError(f"{self.run_json}: cannot be read ({error})") from None
        if value is None:
            raise UsageError(f"{self.root} is not a run directory: it has no run.json")
        return value


def default_path(regime: str, pool: str) -> Path:
    """A name under `runs/` that is not taken: regime, pool and time."""
    stem = Path("runs") / f"{regime}-{pool}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def check_free(path: Path) -> None:
    """Raise RunDirectoryError when `path` is a file, or a directory that holds anything."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        what = "already holds a run" if (path / "run.json").exists() else "already exists and is not empty"
        raise RunDirectoryError(
            f"run directory {path} {what}; name another with --run-dir, leave --run-dir out for a new one under "
            "runs/, or remove it first"
        )


def create(path: Path, info: dict[str, Any]) -> RunDirectory:
    """Claim `path` for a run: make it and create run.json, exclusively, before anything else.

    Raises RunDirectoryError when it is taken (by a run that starts at the same moment, too) or not writable.
    """
    run = RunDirectory(path.expanduser().absolute())
    check_free(run.root)
    text = json.dumps(info, indent=1, allow_nan=False) + "\n"
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        with run.run_json.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                run.run_json.unlink()  # the disk is full: a half-written run.json would read as a run
                raise
    except FileExistsError:
        raise RunDirectoryError(f"run directory {path} was taken by another run just now") from None
    except OSError as error:
        raise RunDirectoryError(
            f"run directory {path} cannot be written: {error.strerror or error}; name another with --run-dir"
        ) from None
    return run


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's result; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> list[str]:
    """The command as it was typed, its first word without the path."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
