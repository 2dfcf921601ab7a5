"""Files of rows that users name: one table of formats, for tasks, sources, rollouts and evaluations alike."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, AnyStr, BinaryIO, cast

from mutualrl.errors import DataError, FileDamagedError
from mutualrl.storage.files import open_regular
from mutualrl.tasks.base import NumberedRows
from mutualrl.tasks.run_reader import is_conversation

#: given the columns of a file, those to decode: of a format that can leave some out
Wanted = Callable[[list[str]], list[str]]


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Yield a data file that the user named, open for reading, decompressed if its name ends in `.gz`. Raises DataError
    if it is missing, cannot be read, or is not a regular file: reading a FIFO or a device might never end."""
    try:
        with open_regular(path) as file:
            if path.suffix.lower() != ".gz":
                yield file
                return
            with gzip.open(file, "rb") as unpacked:
                yield cast(BinaryIO, unpacked)
    except FileNotFoundError:
        raise DataError(f"data file not found: {path} (check --data)") from None
    except FileDamagedError:
        kind = "a directory" if path.is_dir() else "a FIFO, a device or a socket"
        raise DataError(f"{path} is {kind}, expected a data file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


#: bytes of a line of JSON Lines, characters of one of CSV: a small compressed file may hold a line larger than memory
LONGEST_LINE = 64 * 2**20


def bounded_lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """Yield the lines of a file. Raises DataError for one that is too long."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{path}, line {number}: over {LONGEST_LINE:,} bytes, expected one row per line; split the row"
            )
        yield line


def read_jsonl(path: Path) -> NumberedRows:
    """Yield rows of a JSON Lines file as (line number from 1, object); blank lines are skipped.

    Raises DataError when the file is missing, is not UTF-8, is empty, or a line is not a JSON object.
    """
    count = 0
    with open_data(path) as file:
        for number, line in enumerate(bounded_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, row {number}: not a line of JSON ({error}); expected one object per line"
                ) from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}: found {type(row).__name__}, expected a JSON object")
            count += 1
            yield number, row
    if count == 0:
        raise DataError(f"{path}: the file has no rows")


def _csv(path: Path, wanted: Wanted | None, delimiter: str) -> NumberedRows:
    """Yield the records of a CSV or TSV file, numbered from 1 after the header. Raises DataError for a record with more
    or fewer fields than the header, a stray quote, and bytes that are not UTF-8: each would change labels or swallow
    rows."""
    csv.field_size_limit(LONGEST_LINE)
    number = 0
    try:
        with open_data(path) as binary:
            file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            lines = bounded_lines(file, path)
            for number, row in enumerate(csv.DictReader(lines, strict=True, delimiter=delimiter), 1):
                if None in row:
                    raise DataError(
                        f"{path}, row {number}: {len(row[None])} more fields than the header has columns (an "
                        "unquoted delimiter?)"
                    )
                if missing := [name for name, value in row.items() if value is None]:
                    raise DataError(
                        f"{path}, row {number}: {len(missing)} fewer fields than the header has columns: no value for "
                        f"{', '.join(map(repr, missing[:5]))}"
                    )
                yield number, row
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {number + 1}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}, row {number + 1}: not CSV ({error})") from None


def _jsonl(path: Path, wanted: Wanted | None) -> NumberedRows:
    return read_jsonl(path)


#: bytes of a document: all of it is parsed at once
LONGEST_DOCUMENT = 2**29


def _json(path: Path, wanted: Wanted | None) -> NumberedRows:
    """Yield the rows of a JSON document: the objects of an array, or one object, as a run in ATIF is. A file with an
    object per line is read as JSON Lines."""
    with open_data(path) as file:
        data = file.read(LONGEST_DOCUMENT + 1)
    if len(data) > LONGEST_DOCUMENT:
        raise DataError(
            f"{path}: over {LONGEST_DOCUMENT:,} bytes, which are parsed at once; expected JSON Lines, one object per "
            f"line (jq -c '.[]' {path.name})"
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        yield from read_jsonl(path)  # says what is wrong, and where
        return
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}: found {type(row).__name__}, expected a JSON object")
        yield number, row
    if not rows:
        raise DataError(f"{path}: the file has no rows")


def _is_run(path: Path) -> bool:
    """Return whether a JSON document is an agent's run, as ATIF writes one per file."""
    try:
        with open_data(path) as file:
            data = file.read(LONGEST_LINE + 1)
        document = json.loads(data) if b'"steps"' in data and len(data) <= LONGEST_LINE else None
    except (DataError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "steps" in document and is_conversation("steps", document)


def _parquet(path: Path, wanted: Wanted | None) -> NumberedRows:
    from mutualrl.storage import parquet

    number = 0
    with open_data(path):  # refuses what is no regular file
        limit = None if wanted is not None else parquet.LARGEST  # who wants all columns keeps the rows
        for number, row in enumerate(parquet.iter_rows(path, wanted or list, limit=limit), 1):
            yield number, row
    if number == 0:
        raise DataError(f"{path}: the file has no rows")


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [str(name) for name in pq.read_schema(path).names]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from None


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How files of a suffix are read: their rows, numbered from 1, and their columns (None: those of the first row).
    `typed`: a value has a type; without, each is a text, as written. `belongs`: whether a file of that suffix in a
    directory is one of rows (None: each is)."""

    rows: Callable[[Path, Wanted | None], NumberedRows]
    columns: Callable[[Path], list[str]] | None = None
    typed: bool = True
    belongs: Callable[[Path], bool] | None = None


#: by suffix, without `.gz`. Values of CSV stay strings: type inference would turn the label 3 into 3.0, and 007 into 7
FORMATS = {
    ".jsonl": FileFormat(_jsonl),
    ".json": FileFormat(_json, belongs=_is_run),  # beside data lie settings, indexes and reports
    ".parquet": FileFormat(_parquet, _parquet_columns),
    ".csv": FileFormat(partial(_csv, delimiter=","), typed=False),
    ".tsv": FileFormat(partial(_csv, delimiter="\t"), typed=False),
}
EXPECTED = "expected .jsonl, .json, .csv, .tsv (each also .gz), .parquet, or a directory of `datasets`"


def suffix_of(path: Path) -> str:
    """Return a file's suffix in lower case, without `.gz`: `rows.jsonl.gz` is `.jsonl`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def format_of(path: Path) -> FileFormat:
    """Return how a file is read: by its suffix, as JSON Lines if that is no known one."""
    return FORMATS.get(suffix_of(path), FORMATS[".jsonl"])


def file_rows(path: Path, wanted: Wanted | None = None) -> NumberedRows:
    """Return (row number from 1, row) of a file. Raises DataError if it is missing, cannot be read, or has no rows."""
    return format_of(path).rows(path, wanted)


def columns_of(path: Path) -> list[str]:
    """Return the columns of a file; where rows may differ, those of the first. Raises DataError as `file_rows` does."""
    found = format_of(path)
    return found.columns(path) if found.columns is not None else [str(name) for name in next(found.rows(path, None))[1]]


def data_files(directory: Path, depth: int | None = None) -> list[Path]:
    """Return the files of known formats below a directory, in order, hidden ones left out. `depth`: levels of
    directories, this one included; None: all."""
    found: list[Path] = []
    for root, directories, files in os.walk(directory):
        level = len(Path(root).relative_to(directory).parts) + 1
        directories[:] = sorted(directories) if depth is None or level < depth else []
        names = sorted(name for name in files if not name.startswith("."))
        for path in (Path(root) / name for name in names if suffix_of(Path(name)) in FORMATS):
            belongs = format_of(path).belongs
            found += [path] if path.is_file() and (belongs is None or belongs(path)) else []
    return found
