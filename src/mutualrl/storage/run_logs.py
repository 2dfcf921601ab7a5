"""Logs of a policy, `metrics.jsonl`, `rescues.jsonl` and `samples.jsonl`: they grow line by line and have no checksum.

Size and sha256 of their content so far are recorded with each checkpoint and at the policy's end; readers compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from mutualrl.errors import CheckpointDamagedError, FileDamagedError
from mutualrl.storage.artifacts import FileDigest, prefix_digest
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import JsonObject, read_checksummed
from mutualrl.storage.rundir import PolicyFiles

LOGS = "logs"  # key of the sums in result.json and in the progress of a checkpoint's marker


def log_paths(files: PolicyFiles) -> tuple[Path, ...]:
    """Return the paths of a policy's logs, which need not exist."""
    return files.metrics, files.rescues, files.samples


def current_sums(files: PolicyFiles) -> JsonObject:
    """Return the current size and sha256 of the existing logs, by name."""
    return {path.name: asdict(prefix_digest(path)) for path in log_paths(files) if path.is_file()}


def recorded_sums(files: PolicyFiles) -> dict[Path, FileDigest]:
    """Return the recorded sums of a policy's logs, from its result or else its newest intact checkpoint. A damaged
    record is skipped: it is checked elsewhere."""
    recorded = _recorded(files)
    return {path: FileDigest(**recorded[path.name]) for path in log_paths(files) if path.name in recorded}


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


def verify_log(path: Path, expected: FileDigest) -> None:
    """Raise FileDamagedError if a log does not begin with the recorded content."""
    if not path.is_file():
        raise FileDamagedError(f"{path}: missing")
    if prefix_digest(path, expected.bytes) != expected:
        raise FileDamagedError(f"{path}: its first {expected.bytes:,} bytes are not what the policy wrote")
