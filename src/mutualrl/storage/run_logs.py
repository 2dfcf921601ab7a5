"""Logs of a policy, `metrics.jsonl` and `rescues.jsonl`: they grow line by line, and carry no checksum of their own.

What they begin with is summed with each checkpoint and at the policy's end; readers compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mutualrl.errors import CheckpointDamagedError, FileDamagedError
from mutualrl.storage.artifacts import FileSum, prefix_sum
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import JsonObject, read_checksummed
from mutualrl.storage.rundir import PolicyFiles

LOGS = "logs"  # the key of the sums in result.json, and in the progress of a checkpoint's marker


def log_paths(files: PolicyFiles) -> tuple[Path, ...]:
    """Return the paths of a policy's logs, which need not exist."""
    return files.metrics, files.rescues


def current_sums(files: PolicyFiles) -> JsonObject:
    """Return current size and sha256 of the logs that exist, by name."""
    return {path.name: asdict(prefix_sum(path)) for path in log_paths(files) if path.is_file()}


def recorded_sums(files: PolicyFiles) -> dict[Path, FileSum]:
    """Return what a policy recorded of its logs at its end, else with its newest intact checkpoint. A record that is
    damaged is left aside: it is checked elsewhere."""
    recorded = _recorded(files)
    return {path: FileSum(**recorded[path.name]) for path in log_paths(files) if path.name in recorded}


def _recorded(files: PolicyFiles) -> JsonObject:
    try:
        result = read_checksummed(files.result, root=files.run)
    except (FileDamagedError, OSError):
        result = None
    if result is not None:
        return result.get(LOGS) or {}
    checkpoints = Checkpoints(files.root)
    for step in reversed(checkpoints.steps()):
        try:
            return checkpoints.marker(step).progress.get(LOGS) or {}
        except CheckpointDamagedError:
            continue
    return {}


def require_log(path: Path, expected: FileSum) -> None:
    """Raise FileDamagedError when a log does not begin with what was recorded of it."""
    if not path.is_file():
        raise FileDamagedError(f"{path}: missing")
    if prefix_sum(path, expected.bytes) != expected:
        raise FileDamagedError(f"{path}: its first {expected.bytes:,} bytes are not what the policy wrote")
