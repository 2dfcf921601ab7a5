"""The names of the files of an exchange."""

from __future__ import annotations

import re
from pathlib import Path

PART_NAME = re.compile(r"([0-9]{6,})(\.[0-9]+)?(\.a[0-9]+)?\.parquet")
MARKER_NAME = re.compile(r"([0-9]{6,})\.json")


def round_of(name: str) -> int | None:
    """The round that a part or a marker belongs to; None for any other file."""
    match = PART_NAME.fullmatch(name) or MARKER_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def committed_rounds(directory: Path) -> list[int]:
    """Rounds of a policy that have a commit marker, in order."""
    if not directory.is_dir():
        return []
    return sorted(int(m[1]) for m in (MARKER_NAME.fullmatch(p.name) for p in directory.iterdir()) if m)


def marker_name(round_: int) -> str:
    """The name of a round's commit marker."""
    return f"{round_:06d}.json"
