"""Checkpoints on disk: complete or absent. No torch.

`<policy>/checkpoints/step-000020/` has the files of all ranks and, written last, `complete.json` with the size and
sha256 of each. It is written to a staging directory and renamed; then `latest.json` is replaced atomically. A reader
accepts a directory only if every file matches the marker."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mutualrl.errors import CheckpointDamagedError, DiskError, FileDamagedError
from mutualrl.storage.artifacts import MARKER, FileDigest, compare_files
from mutualrl.storage.files import JsonObject, read_checksummed, sync_directory, write_checksummed, write_json
from mutualrl.storage.format import FORMAT, other_format

LATEST = "latest.json"
_COMPLETE = re.compile(r"step-([0-9]{6,})")
_QUARANTINED = re.compile(r"\.step-[0-9]{6,}\.damaged")


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """Marker of a complete checkpoint. `round` is the exchange cursor: the first round that a policy resumed from it
    reads; earlier rounds are no longer needed. `progress`: totals that the policy accumulates across restarts."""

    run_id: str
    policy: str
    step: int
    round: int
    attempt: int
    ranks: int
    files: dict[str, FileDigest]
    progress: JsonObject = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def from_json(cls, value: JsonObject) -> CheckpointMarker:
        """Parse a marker. Raises KeyError, TypeError or ValueError when it is not one."""
        return cls(**{**value, "files": {name: FileDigest(**entry) for name, entry in value["files"].items()}})


class Checkpoints:
    """Checkpoints of one policy, which is their only writer: complete ones in `<policy>/checkpoints`, the one being
    written in `<policy>/trainer`, by transformers."""

    def __init__(self, policy: Path) -> None:
        self.root = policy / "checkpoints"
        self.staging = policy / "trainer"

    def path(self, step: int) -> Path:
        """Return the path of a step's complete checkpoint."""
        return self.root / f"step-{step:06d}"

    def staged(self, step: int) -> Path:
        """Return the path of a step's checkpoint while it is written. Transformers chooses the name."""
        return self.staging / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, oldest first. Their files are not verified."""
        if not self.root.is_dir():
            return []
        matches = (_COMPLETE.fullmatch(p.name) for p in self.root.iterdir() if (p / MARKER).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def incomplete(self) -> list[Path]:
        """Return the step directories without a marker, which are not read: left by a kill, or damaged."""
        if not self.root.is_dir():
            return []
        directories = (path for path in self.root.iterdir() if _COMPLETE.fullmatch(path.name))
        return sorted(path for path in directories if not (path / MARKER).is_file())

    def clear_partial(self) -> None:
        """Remove an earlier attempt's partial checkpoints."""
        if self.staging.is_dir():
            shutil.rmtree(self.staging)
        for path in self.incomplete():
            shutil.rmtree(path)

    def require_space(self, step: int, needed: int) -> None:
        """Raise DiskError naming path and bytes if the disk has fewer than `needed` bytes free."""
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise DiskError(
                f"{self.path(step)}: a checkpoint needs {needed:,} bytes, the disk has {free:,} free; make space, or "
                "lower run.keep_checkpoints, then: mutualrl train --resume --run-dir DIR"
            )

    def size(self) -> int:
        """Return the size in bytes of the newest complete checkpoint; 0 if there is none."""
        steps = self.steps()
        return sum(f.bytes for f in self.marker(steps[-1]).files.values()) if steps else 0

    def commit(self, marker: CheckpointMarker) -> Path:
        """Turn the staged files, already synced to disk, into the step's checkpoint: write the marker, rename, update
        `latest.json`."""
        self.root.mkdir(parents=True, exist_ok=True)
        staging, final = self.staged(marker.step), self.path(marker.step)
        for directory in {staging / Path(name).parent for name in marker.files}:
            sync_directory(directory)
        write_checksummed(staging / MARKER, asdict(marker))
        staging.replace(final)
        sync_directory(self.root)
        write_json(self.root / LATEST, {"step": marker.step, "directory": final.name})
        return final

    def prune(self, keep: int) -> None:
        """Remove quarantined checkpoints and all but the newest `keep` complete ones, each marker first, so that a
        partly removed checkpoint does not count as complete."""
        for path in self.root.iterdir():
            if _QUARANTINED.fullmatch(path.name):
                shutil.rmtree(path)
        for step in self.steps()[:-keep]:
            (self.path(step) / MARKER).unlink()
            sync_directory(self.path(step))
            shutil.rmtree(self.path(step))

    def marker(self, step: int) -> CheckpointMarker:
        """Return the marker of a step. Raises CheckpointDamagedError if it is missing, changed or of another format."""
        path = self.path(step) / MARKER
        try:
            value = read_checksummed(path)
            if value is None:
                raise ValueError("missing")
            if (problem := other_format(value["format"], path)) is not None:
                raise AnotherFormatError(problem)
            marker = CheckpointMarker.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointDamagedError(f"{path}: not a checkpoint marker ({error})") from None
        if marker.step != step:
            raise CheckpointDamagedError(f"{path}: written for step {marker.step}")
        return marker

    def newest_cursor(self) -> int:
        """Return the exchange cursor of the newest checkpoint with an intact marker; 0 if there is none."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointDamagedError):
                return self.marker(step).round
        return 0

    def cursors(self) -> dict[int, int]:
        """Return the exchange cursor of each step's checkpoint with an intact marker."""
        cursors = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointDamagedError):
                cursors[step] = self.marker(step).round
        return cursors

    def verify(self, step: int) -> CheckpointMarker:
        """Verify a step's files against its marker and return the marker. Raises CheckpointDamagedError naming the
        file."""
        marker = self.marker(step)
        try:
            compare_files(self.path(step), marker.files)
        except FileDamagedError as error:
            raise CheckpointDamagedError(str(error)) from None
        return marker

    def newest(self, run_id: str, policy: str, notify: Callable[[str], None]) -> CheckpointMarker | None:
        """Return the marker of this policy's newest intact checkpoint, or None if there is no checkpoint. Newer damaged
        ones are reported to `notify` and quarantined.

        Raises CheckpointDamagedError if there are checkpoints but none is intact, or one is of another format, run or
        policy: a policy never restarts from scratch because its checkpoints cannot be read."""
        damaged: list[tuple[int, CheckpointDamagedError]] = []
        for step in reversed(self.steps()):
            try:
                marker = self.verify(step)
            except AnotherFormatError:
                raise
            except CheckpointDamagedError as error:
                damaged.append((step, error))
                continue
            if (marker.run_id, marker.policy) != (run_id, policy):
                raise CheckpointDamagedError(
                    f"{self.path(step)}: of run {marker.run_id!r}, policy {marker.policy!r}, not of this one"
                )
            for damaged_step, cause in damaged:
                notify(f"checkpoint skipped: {cause}")
                self.quarantine(damaged_step)
            return marker
        if damaged:
            raise CheckpointDamagedError(
                f"policy {policy!r} has no intact checkpoint: {'; '.join(str(cause) for _, cause in damaged)}. Restore "
                "one, or train from the start with --clean or another --run-dir"
            )
        return None

    def quarantine(self, step: int) -> None:
        """Rename a step's checkpoint so that it is never read; the next save removes it."""
        quarantine = self.root / f".step-{step:06d}.damaged"
        if quarantine.exists():
            shutil.rmtree(quarantine)
        self.path(step).replace(quarantine)


class AnotherFormatError(CheckpointDamagedError):
    """Checkpoint of another mutualrl version."""


def oldest_needed(policies: Sequence[Path], staleness: int = 0) -> int:
    """Return the first round that a policy may still need: `staleness` rounds before the smallest cursor of any kept
    complete checkpoint; 0 if a policy has none. `policies`: the directories of all policies of the pool."""
    cursors = []
    for policy in policies:
        checkpoints = Checkpoints(policy)
        rounds = []
        for step in checkpoints.steps():
            try:
                rounds.append(checkpoints.marker(step).round)
            except CheckpointDamagedError:
                return 0  # without its cursor, any round may be needed
        cursors.append(min(rounds, default=0))
    return max(min(cursors, default=0) - staleness, 0)
