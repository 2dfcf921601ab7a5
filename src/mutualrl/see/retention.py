"""What may be deleted from the exchange, and deleting it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mutualrl.see.files import committed_rounds, round_of
from mutualrl.storage.files import sync_directory


def deletable(rounds: Iterable[int], needed: int, keep: int) -> list[int]:
    """The rounds that may go: older than `needed`, the first that some policy may still read, and not among the newest
    `keep`."""
    ordered = sorted(rounds)
    return [round_ for round_ in ordered[: max(len(ordered) - keep, 0)] if round_ < needed]


def collect(directory: Path, needed: int, keep: int, *, dry_run: bool = False) -> tuple[list[int], int]:
    """Delete a policy's deletable rounds; returns them and the bytes that they took. The markers go first, so that a
    round is whole or not there."""
    gone = deletable(committed_rounds(directory), needed, keep)
    if not gone:
        return [], 0
    wanted = set(gone)
    files = [path for path in directory.iterdir() if round_of(path.name) in wanted]
    size = sum(path.stat().st_size for path in files)
    if not dry_run:
        for path in files:
            if path.suffix == ".json":
                path.unlink()
        sync_directory(directory)
        for path in files:
            if path.suffix != ".json":
                path.unlink()
    return gone, size
