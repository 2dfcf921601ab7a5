"""Columns of a shard, fields of its commit marker, and the Parquet encoding of records.

The bytes of a shard depend only on its records: time, process and attempt are in the marker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.records import Rollout

SCHEMA_VERSION = "2.0"  # of shards and markers; a newer minor version adds columns or fields

SCHEMA = pa.schema(
    [
        pa.field("policy", pa.string(), nullable=False),
        pa.field("round", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("rollout", pa.int32(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("ended", pa.bool_(), nullable=False),
        pa.field("x_text", pa.string()),
        pa.field("y_text", pa.string()),
        pa.field("advantage", pa.float64()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
    ]
)

#: field of a rollout in each column; the column names are the paper's
FIELD_OF = {
    "prompt_id": "prompt_id",
    "rollout": "index",
    "reward": "reward",
    "ended": "ended",
    "x_text": "prompt",
    "y_text": "text",
    "advantage": "advantage",
    "token_ids": "token_ids",
    "logprobs": "logprobs",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Data file of a round: name, content hash, size in bytes and number of records."""

    file: str
    sha256: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class Marker:
    """Commit marker of a round: written last, it makes the round exist.

    `sha256`, `bytes` and `rows` describe the round: with one part they are the part's, with several `sha256` is the
    hash of the parts' hashes in order and the two numbers are sums. The stored marker has its own checksum.
    """

    schema_version: str
    run_id: str
    policy: str
    round: int
    policy_step: int
    attempt: int
    sha256: str
    bytes: int
    rows: int
    parts: tuple[Part, ...]
    written_at: float

    def to_json(self) -> dict[str, object]:
        """Return the marker as stored."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Marker:
        """Parse a marker. Raises KeyError, TypeError or ValueError when a field is missing or has another type."""
        parts = tuple(Part(str(p["file"]), str(p["sha256"]), int(p["bytes"]), int(p["rows"])) for p in value["parts"])
        if not parts:
            raise ValueError("the marker has no parts")
        return cls(
            schema_version=str(value["schema_version"]),
            run_id=str(value["run_id"]),
            policy=str(value["policy"]),
            round=int(value["round"]),
            policy_step=int(value["policy_step"]),
            attempt=int(value["attempt"]),
            sha256=str(value["sha256"]),
            bytes=int(value["bytes"]),
            rows=int(value["rows"]),
            parts=parts,
            written_at=float(value["written_at"]),
        )


def combined_hash(parts: Sequence[Part]) -> str:
    """Return the hash of a round: its only part's, or the hash of the parts' hex digests in order."""
    if len(parts) == 1:
        return parts[0].sha256
    return hashlib.sha256("".join(p.sha256 for p in parts).encode()).hexdigest()


def encode(policy: str, round_index: int, rollouts: Sequence[Rollout]) -> bytes:
    """Return the Parquet bytes of a part: zstd, page checksums, dictionary encoding for the id columns only."""
    columns: dict[str, Any] = {
        "policy": [policy] * len(rollouts),
        "round": [round_index] * len(rollouts),
    }
    for name in SCHEMA.names[2:]:
        columns[name] = [getattr(rollout, FIELD_OF[name]) for rollout in rollouts]
    for name in ("token_ids", "logprobs"):
        columns[name] = _lists(columns[name], SCHEMA.field(name).type)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema=SCHEMA),
        sink,
        compression="zstd",
        use_dictionary=["policy", "prompt_id"],
        write_page_checksum=True,
        write_statistics=["policy", "round", "prompt_id", "reward"],
        store_schema=False,
    )
    return bytes(sink.getvalue())


def _lists(rows: Sequence[Sequence[Any] | None], kind: pa.ListType) -> pa.Array:
    """Return a column of lists, through NumPy if no row is missing: Arrow takes a third longer for tuples of Python
    numbers."""
    if not rows or any(row is None for row in rows):
        return pa.array(rows, type=kind)
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows if row is not None], out=offsets[1:])
    flat = chain.from_iterable(row for row in rows if row is not None)
    values = np.fromiter(flat, dtype=kind.value_type.to_pandas_dtype(), count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind)
