"""Rows of a data set, local or on the hub; errors name missing fields and fields of another type."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mutualrl.errors import DataError
from mutualrl.storage.files import try_stat
from mutualrl.tasks.base import NumberedRows, Row, unicode_text
from mutualrl.tasks.files import EXPECTED, file_rows

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row: its fields, its file or hub data set, and its number there, from 1."""

    values: Mapping[str, object]
    where: str
    number: int

    def take(self, field: str) -> object:
        """Return the value of a field; `a.b` is field b of the object in field a, unless there is a field `a.b`. Raises
        DataError if it is missing."""
        value: object = self.values
        for part in [field] if field in self.values else field.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise DataError(self.lacks([field]))
            value = value[part]
        return value

    def lacks(self, fields: Sequence[str]) -> str:
        """Return the message that the row has none of these fields."""
        noun = "field" if len(fields) == 1 else "fields"
        return f"{self.where}, row {self.number}: no {noun} {', '.join(map(repr, fields))} (found: {self._found()})"

    def present(self, field: str) -> object:
        """Return the value of a field. Raises DataError if it is missing, null, or a number that is not finite."""
        value = self.take(field)
        if value is None:
            raise DataError(f"{self.where}, row {self.number}: field '{field}' is null; fill it in, or drop the row")
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(
                f"{self.where}, row {self.number}: field '{field}' is {value} (a missing value?); expected a finite "
                "number; fill it in, or drop the row"
            )
        return value

    def string(self, field: str) -> str:
        """Return a string field unchanged; it may be blank."""
        value = self.take(field)
        if not isinstance(value, str):
            self.refuse(field, value, "a string")
        return unicode_text(value, field, Path(self.where), self.number)

    def label(self, field: str) -> str | None:
        """Return the value of a field as text; None if it is missing, null or empty."""
        value = self.values.get(field)
        return None if value in (None, "") else unicode_text(str(value), field, Path(self.where), self.number)

    def text(self, field: str) -> str:
        """Return a string field that is not blank."""
        value = self.string(field)
        if not value.strip():
            self.refuse(field, value, "a non-empty string")
        return value

    def texts(self, field: str, value: object) -> list[str]:
        """Return `value`, the field's value, if it is a list of two or more strings. Raises DataError otherwise."""
        items = list(value) if isinstance(value, list | tuple) else []
        if len(items) < 2 or len(items) > len(LETTERS) or not all(isinstance(item, str) for item in items):
            self.refuse(field, value, f"a list of 2 to {len(LETTERS)} strings")
        return [unicode_text(item, field, Path(self.where), self.number) for item in items]

    def index(self, field: str, options: int, *, first: int) -> int:
        """Return a label, an integer or its digits, that counts options from `first`; the result counts from 0."""
        value = self.take(field)
        if value in ("", "-1", -1) and not isinstance(value, bool):
            raise DataError(
                f"{self.where}, row {self.number}, field '{field}': found {value!r}: a split without public labels; "
                "name one that has them (the validation split)"
            )
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not first <= value < first + options:
            self.refuse(field, self.take(field), f"{first} to {first + options - 1}")
        return int(value) - first

    def refuse(self, field: str, value: object, expected: str) -> NoReturn:
        """Raise DataError for a field with an unexpected value."""
        raise DataError(
            f"{self.where}, row {self.number}, field '{field}': found {repr(value)[:80]}, expected {expected}"
        )

    def _found(self) -> str:
        return ", ".join(sorted(map(str, self.values))[:12])[:200] or "none"


def split_in(names: list[str], split: str, path: Path) -> str:
    """Return the name of the split to read from a directory. Raises DataError if there is none."""
    candidates = ("train",) if split == "train" else ("test", "validation", "train")
    for name in candidates:
        if name in names:
            return name
    raise DataError(f"{path}: found the splits {', '.join(names)}, expected {' or '.join(candidates)}")


def quiet_bars() -> None:
    """Disable the progress bars of `datasets` if stderr is not a terminal."""
    from datasets import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()


def version_of(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return names, sizes, times and inodes of a data set's files: the cache of its rows is valid while these are the
    same. Empty for a reference to the hub."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def read_rows(path: Path, split: str = "train") -> NumberedRows:
    """Yield (row number from 1, row) of a file (`files.FORMATS`), or of a directory that `datasets` reads. `split`: the
    split of a directory; for `validation` the test, validation or training split, whichever exists first. Raises
    DataError if it is missing or cannot be read."""
    if try_stat(path) is None:
        raise DataError(f"data file not found: {path} ({EXPECTED})")
    yield from _of_directory(path, split) if path.is_dir() else file_rows(path)


def _of_directory(path: Path, split: str) -> NumberedRows:
    from datasets import load_dataset, load_from_disk

    with _named_errors(path):
        saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
        data = load_from_disk(str(path)) if saved else load_dataset(str(path))
    if isinstance(data, dict):
        data = data[split_in(list(data), split, path)]
    yield from numbered(data)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Convert the errors of `datasets` to DataErrors with the path."""
    import pyarrow as pa
    from datasets.exceptions import DatasetGenerationError

    quiet_bars()
    try:
        yield
    except (OSError, ValueError, pa.ArrowException, DatasetGenerationError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read as a data set ({error})") from error


def numbered(data: Iterable[Row]) -> NumberedRows:
    """Yield (row number from 1, row) of a data set of `datasets`."""
    for number, row in enumerate(data, 1):
        yield number, dict(row)
