"""Plan of a sweep: missing pieces, pieces in parallel, and estimated minutes and bytes."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.errors import UsageError
from mutualrl.machine.devices import this_machine
from mutualrl.storage.files import JsonObject, read_checksummed
from mutualrl.study.sweep_directory import beside, outcome_file
from mutualrl.study.sweep_file import Piece, Sweep, weights_of

_STATES = 4  # times the weights' bytes: a running piece has a model, and a checkpoint with Adam's two moments


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """Plan of a sweep: seconds of each finished piece, missing pieces, `--jobs`, and estimates of the remaining minutes
    and bytes; None if the duration or size of a piece is unknown."""

    seconds: Mapping[Piece, float]
    missing: tuple[Piece, ...]
    jobs: int | None
    minutes: float | None
    bytes: int | None

    def to_json(self) -> JsonObject:
        """Return the plan as JSON."""
        return {
            "pieces": len(self.seconds) + len(self.missing),
            "done": len(self.seconds),
            "missing": [str(piece) for piece in self.missing],
            "jobs": self.jobs,
            "minutes": self.minutes,
            "bytes": self.bytes,
        }


def planned(sweep: Sweep, root: Path, jobs: int | None) -> SweepPlan:
    """Return the plan of a sweep. Raises UsageError if a piece was started by another command."""
    seconds: dict[Piece, float] = {}
    missing: list[Piece] = []
    for piece in sweep.pieces:
        value = read_checksummed(outcome_file(root, piece), root=root)
        record = value or read_checksummed(beside(root, piece, ".began.json"), root=root)
        if record is not None and record.get("command") != identity(sweep, piece):
            raise UsageError(
                f"{root / piece.place} is from another command ({' '.join(record.get('command') or ())}); expected "
                f"{' '.join(identity(sweep, piece))}; name another directory with --out, or remove it and its .json"
            )
        if value is None:
            missing.append(piece)
        else:
            seconds[piece] = float(value["seconds"])
    size = _bytes(sweep, root, list(seconds), missing, jobs or max_jobs(sweep))
    return SweepPlan(seconds, tuple(missing), jobs, estimate_minutes(sweep, missing, seconds, jobs), size)


def identity(sweep: Sweep, piece: Piece) -> list[str]:
    """Return the command of a piece, its directories relative to the sweep's."""
    return [*sweep.command(piece, Path()), *sweep.evaluation(piece, Path())]


def cores_needed(sweep: Sweep, piece: Piece) -> int:
    """Return the number of single-threaded processes of a piece."""
    if sweep.file.arms[piece.arm].distill is not None:
        return 1
    recipe = sweep.recipe(piece)
    return len(recipe.policies) * (recipe.launch.processes or 1)


def max_jobs(sweep: Sweep) -> int:
    """Return the maximum number of pieces in parallel: one with GPUs, which a run divides among its policies; else as
    many of the smallest piece as the cores allow."""
    machine = this_machine()
    if machine.gpus:
        return 1
    return max(1, machine.cores // min(cores_needed(sweep, piece) for piece in sweep.pieces))


def estimate_minutes(
    sweep: Sweep, missing: Sequence[Piece], seconds: Mapping[Piece, float], jobs: int | None
) -> float | None:
    """Estimate the minutes of the missing pieces: each takes the median of its pool and arm, else of all pieces."""
    if not seconds or not missing:
        return None if missing else 0.0
    cores = 1 if this_machine().gpus else this_machine().cores
    total = 0.0
    for piece in missing:
        similar = [each for other, each in seconds.items() if (other.pool, other.arm) == (piece.pool, piece.arm)]
        fraction = 1 / jobs if jobs else min(1.0, cores_needed(sweep, piece) / cores)
        total += fraction * statistics.median(similar or seconds.values())
    return total / 60


def _bytes(sweep: Sweep, root: Path, done: Sequence[Piece], missing: Sequence[Piece], jobs: int) -> int | None:
    """Estimate the bytes of the missing pieces, with the checkpoints of those that run in parallel."""
    sizes = [_size(root / piece.place) for piece in done[:3]]
    largest, total = 0, 0
    for piece in missing:
        weights = weights_of(sweep.recipe(piece))
        if sizes:
            total += int(statistics.mean(sizes))
        elif weights is None:
            return None
        else:
            total += weights
        largest = max(largest, weights or 0)
    return total + _STATES * largest * jobs if missing else 0


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def require_capacity(plan: SweepPlan, root: Path, gigabytes: float | None) -> None:
    """Raise UsageError if the missing pieces do not fit on the disk, or all pieces in the budget."""
    if plan.bytes is None:
        return
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    room, source = free, f"free on the disk of {existing}"
    if gigabytes is not None:
        remaining = max(0, int(gigabytes * 1e9) - _size(root / "pieces"))
        if remaining < free:
            room, source = remaining, f"left of the budget ({gigabytes} gigabytes)"
    if plan.bytes > room:
        raise UsageError(
            f"the sweep needs about {plan.bytes:,} bytes for {len(plan.missing)} pieces, {room:,} are {source}; use "
            "fewer seeds or arms, or another directory with --out"
        )
