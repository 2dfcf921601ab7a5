"""One peer's round, hash-checked, with its columns decoded on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import ExchangeDamagedError
from mutualrl.see.schema import SCHEMA, SCHEMA_VERSION, Marker, Part, combined_hash


class Shard:
    """The records of one policy in one round. Every byte was compared with the marker before this exists."""

    def __init__(self, marker: Marker, buffers: Sequence[bytes]) -> None:
        self.marker = marker
        self._buffers = buffers
        self._columns: dict[str, list[Any]] = {}

    @property
    def policy(self) -> str:
        """The policy that wrote the records."""
        return self.marker.policy

    @property
    def bytes(self) -> int:
        """Size on disk, all parts together."""
        return self.marker.bytes

    def __len__(self) -> int:
        return self.marker.rows

    def column(self, name: str) -> list[Any]:
        """All values of one column, in the writer's order; decoded once, and only the columns asked for."""
        if name not in self._columns:
            tables = [pq.read_table(pa.BufferReader(b), columns=[name]) for b in self._buffers]
            self._columns[name] = pa.concat_tables(tables).column(name).to_pylist()
        return self._columns[name]

    def texts(self, rows: Sequence[int]) -> list[str | None]:
        """Completion texts of the given rows alone: the column is unpacked, only these become strings."""
        if not rows:
            return []
        tables = [pq.read_table(pa.BufferReader(b), columns=["y_text"]) for b in self._buffers]
        texts: list[str | None] = pa.concat_tables(tables).column("y_text").take(pa.array(rows)).to_pylist()
        return texts


def load_shard(directory: Path, marker: Marker) -> Shard:
    """Read the parts that `marker` names. Raises ExchangeDamagedError on any difference, naming the file."""
    major = marker.schema_version.split(".", maxsplit=1)[0]
    if major != SCHEMA_VERSION.split(".", maxsplit=1)[0]:
        raise ExchangeDamagedError(
            f"{directory}: round {marker.round} has schema {marker.schema_version}, this version reads "
            f"{SCHEMA_VERSION}; read it with the mutualrl that wrote it"
        )
    if combined_hash(marker.parts) != marker.sha256:
        raise ExchangeDamagedError(f"{directory}: the marker of round {marker.round} contradicts itself")
    buffers = [_load_part(directory, part) for part in marker.parts]
    return Shard(marker, buffers)


def _load_part(directory: Path, part: Part) -> bytes:
    path = directory / part.file
    if path.name != part.file:
        raise ExchangeDamagedError(f"{directory}: the marker names a file outside its directory: {part.file!r}")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ExchangeDamagedError(f"{path}: named by its marker, but not there") from None
    if len(data) != part.bytes:
        raise ExchangeDamagedError(f"{path}: {len(data)} bytes, its marker says {part.bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != part.sha256:
        raise ExchangeDamagedError(f"{path}: sha256 {digest[:12]}..., its marker says {part.sha256[:12]}...")
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        names, rows = set(file.schema_arrow.names), file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise ExchangeDamagedError(f"{path}: not readable as Parquet ({error})") from None
    missing = set(SCHEMA.names) - names
    if missing or rows != part.rows:
        raise ExchangeDamagedError(f"{path}: {rows} rows (marker: {part.rows}), missing columns: {sorted(missing)}")
    return data
