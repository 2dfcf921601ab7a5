"""Lines of a run's growing files, and what is a row of metrics.jsonl."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mutualrl.errors import FileDamagedError
from mutualrl.storage.files import JsonObject, open_regular, parse_or_none

MOST_STEPS = 10**9
LOOK_BYTES = 4 * 2**20  # per read


class NewLines:
    """Complete lines appended to a growing file since the last read."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """`last_bytes`: start this many bytes before the end of the file; None: at its beginning."""
        self.path = path
        self.restarted = False  # whether the last read found a new or a truncated file
        self._last_bytes = last_bytes
        self._inode, self._offset = 0, 0

    def read(self) -> list[bytes]:
        """Return the new lines without line ends, at most `LOOK_BYTES` at a time. A partial line is left for the next
        read; a missing file has no lines."""
        try:
            with open_regular(self.path) as file:
                state = os.fstat(file.fileno())
                self.restarted = state.st_ino != self._inode or state.st_size < self._offset
                if self.restarted:
                    start = 0 if self._last_bytes is None else max(0, state.st_size - self._last_bytes)
                    self._inode, self._offset = state.st_ino, start
                file.seek(self._offset)
                data = file.read(LOOK_BYTES)
        except (FileDamagedError, OSError):
            self.restarted = False
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) == LOOK_BYTES:
            end = len(data)  # longer than any valid line
        self._offset += end
        return data[:end].removesuffix(b"\n").split(b"\n") if end else []


def is_step(value: object) -> bool:
    """Return whether a value is a step, which that of a damaged line need not be."""
    return type(value) is int and 0 <= value <= MOST_STEPS


def step_of(line: bytes) -> JsonObject | None:
    """Return the row of a line; None if it is no JSON object with a step."""
    row = parse_or_none(line)
    return row if row is not None and is_step(row.get("step")) else None


def steps_in(lines: Iterable[bytes]) -> Iterator[JsonObject]:
    """Yield the rows of lines that have a step; others are damaged."""
    return (row for line in lines if (row := step_of(line)) is not None)


def last_steps(path: Path, last_bytes: int | None = None) -> list[JsonObject]:
    """Return the rows with a step in the last bytes of a file that nobody truncates meanwhile; None: in all of it."""
    file = NewLines(path, last_bytes)
    return [row for lines in iter(file.read, []) for row in steps_in(lines)]
