"""What a task is: where its prompts come from. Scoring is the same everywhere (`tasks.boxed`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mutualrl.errors import DataError
from mutualrl.records import Prompt

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Where a task reads from: an optional file of training rows, one of validation rows, and a seed."""

    data: Path | None = None
    validation_data: Path | None = None
    seed: int = 0


class Task(Protocol):
    """A named source of prompts. Implementations are modules of `mutualrl.tasks`."""

    name: str

    def load(self, split: Split, source: TaskSource) -> list[Prompt]:
        """All prompts of a split, in a fixed order. Raises DataError naming file, row and field."""
        ...


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts, evenly spaced over the list, so that every group keeps its share."""
    if len(prompts) <= limit:
        return list(prompts)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a JSON Lines file as (line number from 1, object); blank lines are skipped.

    Raises DataError when the file is missing, is not UTF-8, is empty, or a line is not a JSON object.
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "not found"
        raise DataError(f"data file {what}: {path} (expected a JSON Lines file; check --data)")
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, row {number}: not a line of JSON ({error}); expected one object a line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: found {type(row).__name__}, expected a JSON object")
            count += 1
            yield number, row
    if count == 0:
        raise DataError(f"{path}: the file has no rows")


def text_field(row: dict[str, Any], field: str, path: Path, number: int) -> str:
    """A non-empty string field of a row. Raises DataError naming file, row and field."""
    if field not in row:
        found = ", ".join(sorted(row)[:12])[:200] or "none"
        raise DataError(f"{path}, row {number}: no field '{field}' (found: {found})")
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{path}, row {number}, field '{field}': found {repr(value)[:80]}, expected a non-empty string")
    return unicode_text(value, field, path, number)


def unicode_text(value: str, field: str, path: Path, number: int) -> str:
    """`value`, unless it holds half a character (a lone surrogate), which no file and no tokenizer takes."""
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{path}, row {number}, field '{field}': a lone surrogate, expected Unicode text")
    return value
