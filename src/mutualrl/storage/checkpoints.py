"""Checkpoints on disk: complete or absent. No torch.

`<policy>/checkpoints/step-000020/` holds the files of all ranks and, written last, `complete.json` with the size and
the sha256 of each. It is made under another name and renamed; `latest.json` is replaced atomically after that. A reader
takes a directory only when every file matches the marker."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutualrl.errors import CheckpointDamagedError, DiskError, FileDamagedError
from mutualrl.storage.artifacts import MARKER, FileSum, compare_files
from mutualrl.storage.files import read_checksummed, sync_directory, write_checksummed, write_json

FORMAT = 1
LATEST = "latest.json"
_NAME = re.compile(r"step-([0-9]{6,})")
_PASSED = re.compile(r"\.step-[0-9]{6,}\.damaged")


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """Marker of a complete checkpoint. `round` is the exchange cursor: the first round that a policy resumed from here
    reads; no earlier round is needed any more. `progress` is what the policy reports across restarts."""

    run_id: str
    policy: str
    step: int
    round: int
    attempt: int
    ranks: int
    files: dict[str, FileSum]
    progress: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CheckpointMarker:
        """Parse a marker. Raises KeyError, TypeError or ValueError when it is not one."""
        return cls(**{**value, "files": {name: FileSum(**entry) for name, entry in value["files"].items()}})


class Checkpoints:
    """Checkpoints of one policy, which it alone writes: complete ones in `<policy>/checkpoints`, the one in the
    making in `<policy>/trainer`, where transformers writes it."""

    def __init__(self, policy: Path) -> None:
        self.root = policy / "checkpoints"
        self.staging = policy / "trainer"

    def path(self, step: int) -> Path:
        """Return the path of a step's complete checkpoint."""
        return self.root / f"step-{step:06d}"

    def staged(self, step: int) -> Path:
        """Return the path where a step's checkpoint is written, before it is complete. The name is transformers'."""
        return self.staging / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """Return steps with a complete checkpoint, oldest first. Their bytes are not looked at here."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(p.name) for p in self.root.iterdir() if (p / MARKER).is_file())
        return sorted(int(match[1]) for match in matches if match)

    def incomplete(self) -> list[Path]:
        """Return directories of steps without a marker, which nobody reads: a kill left them, or the marker is gone."""
        if not self.root.is_dir():
            return []
        named = (path for path in self.root.iterdir() if _NAME.fullmatch(path.name))
        return sorted(path for path in named if not (path / MARKER).is_file())

    def clear_partial(self) -> None:
        """Remove partial checkpoints of an earlier attempt."""
        if self.staging.is_dir():
            shutil.rmtree(self.staging)
        for path in self.incomplete():
            shutil.rmtree(path)

    def require_space(self, step: int, needed: int) -> None:
        """Raise DiskError naming path and bytes when the disk has less than `needed` bytes free."""
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise DiskError(
                f"{self.path(step)}: a checkpoint needs {needed:,} bytes, the disk has {free:,} free; make room, or "
                "set run.keep_checkpoints lower, then: mutualrl train --resume"
            )

    def size(self) -> int:
        """Return bytes of the newest complete checkpoint; 0 when there is none."""
        steps = self.steps()
        return sum(f.bytes for f in self.marker(steps[-1]).files.values()) if steps else 0

    def commit(self, marker: CheckpointMarker) -> Path:
        """Turn the staged files into the step's checkpoint: marker, rename, `latest`. The files' bytes are on the
        disk."""
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
        """Remove all but the newest `keep` complete checkpoints, and damaged ones in quarantine: the marker
        first, so that none is ever half there."""
        for path in self.root.iterdir():
            if _PASSED.fullmatch(path.name):
                shutil.rmtree(path)
        for step in self.steps()[:-keep]:
            (self.path(step) / MARKER).unlink()
            sync_directory(self.path(step))
            shutil.rmtree(self.path(step))

    def marker(self, step: int) -> CheckpointMarker:
        """Return the marker of a step. Raises CheckpointDamagedError when it is missing, changed, or of another
        format."""
        path = self.path(step) / MARKER
        try:
            value = read_checksummed(path)
            if value is None:
                raise ValueError("not there")
            if value["format"] != FORMAT:
                raise AnotherFormatError(
                    f"{path}: format {value['format']!r}, this version reads {FORMAT}; use the mutualrl that wrote it"
                )
            marker = CheckpointMarker.from_json(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointDamagedError(f"{path}: not a checkpoint marker ({error})") from None
        if marker.step != step:
            raise CheckpointDamagedError(f"{path}: written for step {marker.step}")
        return marker

    def newest_cursor(self) -> int:
        """Return the exchange cursor of the newest checkpoint whose marker is intact; 0 without one."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CheckpointDamagedError):
                return self.marker(step).round
        return 0

    def verify(self, step: int) -> CheckpointMarker:
        """Return the marker of a step whose files were all compared with it. Raises CheckpointDamagedError naming
        the file."""
        marker = self.marker(step)
        try:
            compare_files(self.path(step), marker.files)
        except FileDamagedError as error:
            raise CheckpointDamagedError(str(error)) from None
        return marker

    def newest(self, run_id: str, policy: str, notify: Callable[[str], None]) -> CheckpointMarker | None:
        """Return the newest checkpoint that is intact and this policy's. A damaged one above it is named to `notify`
        and quarantined. None when there is no checkpoint at all.

        Raises CheckpointDamagedError when there are checkpoints and none of them is intact, or one is of another
        format, run or policy: a policy never starts from scratch because its past cannot be read."""
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
            for bad, why in damaged:
                notify(f"checkpoint skipped: {why}")
                self._quarantine(bad)
            return marker
        if damaged:
            raise CheckpointDamagedError(
                f"policy {policy!r} has no intact checkpoint: {'; '.join(str(why) for _, why in damaged)}. Restore "
                "one, or train from the start: --clean, or another --run-dir"
            )
        return None

    def _quarantine(self, step: int) -> None:
        aside = self.root / f".step-{step:06d}.damaged"
        if aside.exists():
            shutil.rmtree(aside)
        self.path(step).replace(aside)


class AnotherFormatError(CheckpointDamagedError):
    """Checkpoint that another version of mutualrl wrote."""


def oldest_needed(policies: Sequence[Path], staleness: int = 0) -> int:
    """Return the first round that some policy may still need: `staleness` rounds before the smallest cursor in any
    policy's oldest kept complete checkpoint; 0 where a policy has none. `policies` are the directories of all policies
    of the pool."""
    cursors = []
    for policy in policies:
        store = Checkpoints(policy)
        rounds = []
        for step in store.steps():
            try:
                rounds.append(store.marker(step).round)
            except CheckpointDamagedError:
                return 0  # what cannot be read cannot be said to have passed anything
        cursors.append(min(rounds, default=0))
    return max(min(cursors, default=0) - staleness, 0)
