"""Bounded reads of untrusted Parquet files: a few kilobytes may decompress to more than the machine's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mutualrl.errors import DataError

logger = logging.getLogger(__name__)

LARGE = 2**28  # bytes of a file when decoded, from which on that is said
LARGEST = 8 * 2**30  # bytes of a file when decoded
ROWS = 1024  # decoded per batch
LARGEST_ROWS = 2**29  # bytes of the rows that are decoded at once


def require_bounded(file: pq.ParquetFile, where: str, limit: int = LARGEST) -> None:
    """Raise DataError if a file's metadata declares pages of more than `limit` bytes in total."""
    declared = sum(file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups))
    if declared > limit:
        raise DataError(f"{where}: {declared:,} bytes when decompressed, expected at most {limit:,}; split the file")
    say_large(where, declared)


def say_large(where: str, declared: int) -> None:
    """Say that a file takes long to decode, before it is."""
    if declared > LARGE:
        logger.warning("%s: %s MiB when decompressed; reading it takes a while", where, f"{declared // 2**20:,}")


def read_table(path: Path, limit: int = LARGEST) -> pa.Table:
    """Return the table in a regular Parquet file, decoded in batches. Raises DataError if it cannot be read, or takes
    more than `limit` bytes when decoded."""
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    batches, total = [], 0
    try:
        with pq.ParquetFile(path) as file:
            require_bounded(file, str(path), limit)
            for batch in file.iter_batches(ROWS):
                total += batch.nbytes
                if total > limit:
                    raise DataError(f"{path}: over {limit:,} bytes when decoded; split the file")
                batches.append(batch)
            return pa.Table.from_batches(batches, schema=file.schema_arrow)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from None


def iter_rows(
    path: Path, columns: Callable[[list[str]], list[str]], rows: int = 64, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a regular Parquet file, some at a time. `columns`: given the file's, returns those to decode.

    Texts stay encoded by their dictionary until the size of the rows is known. Raises DataError naming the row at which
    the file cannot be read, for rows that take more than LARGEST_ROWS bytes, and for more than `limit` bytes in all,
    which is for callers that keep them.
    """
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    read = total = 0
    try:
        with pq.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            say_large(str(path), sum(file.metadata.row_group(n).total_byte_size for n in groups))
            names = columns(file.schema_arrow.names)
            leaves = [file.schema.column(n).path for n in range(len(file.schema.names))]
        with pq.ParquetFile(path, read_dictionary=[leaf for leaf in leaves if leaf.partition(".")[0] in names]) as file:
            for batch in file.iter_batches(rows, columns=names):
                if (size := sum(map(_decoded_bytes, batch.columns))) > LARGEST_ROWS:
                    raise DataError(
                        f"{path}, row {read + 1} and the next {len(batch) - 1}: {size:,} bytes when decoded, expected "
                        f"at most {LARGEST_ROWS:,}"
                    )
                total += size
                if limit is not None and total > limit:
                    raise DataError(f"{path}: over {limit:,} bytes when decoded; split the file")
                yield from batch.to_pylist()
                read += len(batch)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {read + 1} or later: not UTF-8 ({error.reason})") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from None


def _decoded_bytes(array: pa.Array) -> int:
    """Return the size of an array's texts when each is decoded by itself, and of its other values."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).to_numpy(zero_copy_only=False)
        used = array.indices.drop_null().to_numpy(zero_copy_only=False)
        return int(lengths[used].sum()) if len(used) else 0
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _decoded_bytes(array.flatten())
    if pa.types.is_struct(kind):
        return sum(map(_decoded_bytes, array.flatten()))
    return int(array.nbytes)
