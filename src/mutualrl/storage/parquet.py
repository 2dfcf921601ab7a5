"""Bounded reads of untrusted Parquet files: a few kilobytes may decompress to more than the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import DataError

LARGEST = 8 * 2**30  # bytes of a file when decoded
ROWS = 1024  # decoded per batch


def require_bounded(file: pq.ParquetFile, where: str, limit: int = LARGEST) -> None:
    """Raise DataError if a file's metadata declares pages of more than `limit` bytes in total."""
    declared = sum(file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups))
    if declared > limit:
        raise DataError(f"{where}: {declared:,} bytes when decompressed, expected at most {limit:,}; split the file")


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
