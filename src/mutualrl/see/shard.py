"""One policy's round, hash-checked, with columns decoded on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import DataError, ExchangeDamagedError, ExchangeUnreachableError
from mutualrl.see.files import PART_NAME
from mutualrl.see.schema import SCHEMA, Marker, Part, combined_hash
from mutualrl.see.store import ExchangeStore
from mutualrl.storage.parquet import require_bounded


class Shard:
    """Records of one policy in one round. Every byte was verified against the marker beforehand."""

    def __init__(self, marker: Marker, files: Sequence[pq.ParquetFile]) -> None:
        self.marker = marker
        self._files = files
        self._arrays: dict[str, pa.ChunkedArray] = {}
        self._columns: dict[str, list[Any]] = {}

    @property
    def policy(self) -> str:
        """Return the policy that wrote the records."""
        return self.marker.policy

    @property
    def bytes(self) -> int:
        """Return the total size of all parts."""
        return self.marker.bytes

    def __len__(self) -> int:
        return self.marker.rows

    def column(self, name: str) -> list[Any]:
        """Return all values of one column, in the writer's order; each requested column is decoded once."""
        if name not in self._columns:
            self._columns[name] = self._array(name).to_pylist()
        return self._columns[name]

    def arrays(self, name: str) -> list[npt.NDArray[np.int64] | npt.NDArray[np.float64] | None]:
        """Return the values of a list column (token ids, log-probs) as one array per row, None where it has none; of
        64-bit numbers, and without a Python object per token."""
        arrays: list[npt.NDArray[np.int64] | npt.NDArray[np.float64] | None] = []
        for chunk in self._array(name).chunks:
            values = chunk.values.to_numpy(zero_copy_only=False)
            kind = np.float64 if values.dtype.kind == "f" else np.int64
            offsets, present = chunk.offsets.to_numpy(), chunk.is_valid().to_numpy(zero_copy_only=False)
            for row, there in enumerate(present.tolist()):
                arrays.append(values[offsets[row] : offsets[row + 1]].astype(kind) if there else None)
        return arrays

    def texts(self, rows: Sequence[int]) -> list[str | None]:
        """Return the completion texts of some rows; the column is decoded once, and only these rows become strings."""
        array = self._array("y_text")
        return [array[row].as_py() for row in rows]

    def table(self) -> pa.Table:
        """Return all records with every column of this schema version; several parts are in rank order."""
        return pa.concat_tables([file.read(columns=SCHEMA.names, use_threads=False) for file in self._files])

    def _array(self, name: str) -> pa.ChunkedArray:
        if name not in self._arrays:
            tables = [file.read(columns=[name], use_threads=False) for file in self._files]
            self._arrays[name] = pa.concat_tables(tables).column(name)
        return self._arrays[name]


def load_shard(store: ExchangeStore, marker: Marker) -> Shard:
    """Read the parts that `marker` names. Raises ExchangeDamagedError naming the first file that differs."""
    if combined_hash(marker.parts) != marker.sha256:
        where = store.describe(marker.policy)
        raise ExchangeDamagedError(f"{where}: the marker of round {marker.round} is inconsistent with its parts")
    return Shard(marker, [_load_part(store, marker.policy, part) for part in marker.parts])


def _load_part(store: ExchangeStore, policy: str, part: Part) -> pq.ParquetFile:
    path = store.describe(policy, part.file)
    if PART_NAME.fullmatch(part.file) is None:
        where = store.describe(policy)
        raise ExchangeDamagedError(f"{where}: the marker names a file outside its directory: {part.file!r}")
    try:
        data = store.get(policy, part.file)
    except ExchangeUnreachableError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise ExchangeDamagedError(f"{path}: named by its marker, but cannot be read ({reason})") from None
    if data is None:
        raise ExchangeDamagedError(f"{path}: named by its marker, but cannot be read (No such file or directory)")
    if len(data) != part.bytes:
        raise ExchangeDamagedError(f"{path}: {len(data)} bytes, expected {part.bytes} according to its marker")
    digest = hashlib.sha256(data).hexdigest()
    if digest != part.sha256:
        raise ExchangeDamagedError(
            f"{path}: sha256 {digest[:12]}..., expected {part.sha256[:12]}... according to its marker"
        )
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        require_bounded(file, path)
        names, rows = set(file.schema_arrow.names), file.metadata.num_rows
    except DataError as error:
        raise ExchangeDamagedError(str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise ExchangeDamagedError(f"{path}: not readable as Parquet ({error})") from None
    missing = set(SCHEMA.names) - names
    if missing or rows != part.rows:
        raise ExchangeDamagedError(f"{path}: {rows} rows (marker: {part.rows}), missing columns: {sorted(missing)}")
    return file
