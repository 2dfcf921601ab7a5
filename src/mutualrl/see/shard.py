"""One policy's round, hash-checked, with columns decoded on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import DataError, ExchangeDamagedError, ExchangeUnreachableError
from mutualrl.records import Score
from mutualrl.rollouts import SCHEMA, Rollouts
from mutualrl.see.files import PART_NAME
from mutualrl.see.schema import SCORES, Marker, Part, combined_hash
from mutualrl.see.store import ExchangeStore
from mutualrl.storage.parquet import require_bounded


class Shard(Rollouts):
    """Rollouts of one policy in one round, as published. Every byte was verified against the marker beforehand."""

    def __init__(self, marker: Marker, files: Sequence[pq.ParquetFile], scores: Sequence[pq.ParquetFile] = ()) -> None:
        super().__init__(SCHEMA.empty_table())
        self.marker = marker
        self._files = files
        self._scores = scores
        self._arrays: dict[str, pa.ChunkedArray] = {}

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

    def scores(self) -> list[Score]:
        """Return how a source reads others' texts of the round, decoded at each call; empty of any other member."""
        return [Score(*row.values()) for file in self._scores for row in file.read(SCORES.names).to_pylist()]

    def table(self) -> pa.Table:
        """Return all records with every column; several parts are in rank order."""
        return pa.table([self._array(name) for name in SCHEMA.names], schema=SCHEMA)

    def _values(self, field: str) -> list[object]:
        if field in ("policy", "round"):  # every row has the marker's
            return [getattr(self.marker, field)] * len(self)
        return super()._values(field)

    def _array(self, name: str) -> pa.ChunkedArray:
        """Decode a column."""
        if name not in self._arrays:
            parts = [file.read(columns=[name], use_threads=False).column(name) for file in self._files]
            chunks = [chunk for part in parts for chunk in part.cast(SCHEMA.field(name).type).chunks]
            self._arrays[name] = pa.chunked_array(chunks, type=SCHEMA.field(name).type)
        return self._arrays[name]


def load_shard(store: ExchangeStore, marker: Marker) -> Shard:
    """Read the parts that `marker` names. Raises ExchangeDamagedError naming the first file that differs."""
    if combined_hash(marker.parts) != marker.sha256:
        where = store.describe(marker.policy)
        raise ExchangeDamagedError(f"{where}: the marker of round {marker.round} is inconsistent with its parts")
    files, scores = list[pq.ParquetFile](), list[pq.ParquetFile]()
    for part in marker.parts:
        (scores if part.is_scores else files).append(_load_part(store, marker.policy, part))
    return Shard(marker, files, scores)


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
    missing = set((SCORES if part.is_scores else SCHEMA).names) - names
    if missing or rows != part.rows:
        raise ExchangeDamagedError(f"{path}: {rows} rows (marker: {part.rows}), missing columns: {sorted(missing)}")
    return file
