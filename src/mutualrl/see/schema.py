"""Fields of a commit marker, and the Parquet encoding of a round (columns: `mutualrl.rollouts`).

The bytes of a shard depend only on its records: time, process and attempt are in the marker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.records import Score
from mutualrl.rollouts import SCHEMA, Rollouts
from mutualrl.storage.files import JsonObject

#: how the file of a source's scores ends
SCORES_END = ".scores.parquet"
SCORES = pa.schema(
    [
        pa.field("policy", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("rollout", pa.int32(), nullable=False),
        pa.field("ends", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Part:
    """Data file of a round: name, content hash, size in bytes and number of records."""

    file: str
    sha256: str
    bytes: int
    rows: int

    @property
    def is_scores(self) -> bool:
        """Return whether its records are scores of others' texts, not rollouts."""
        return self.file.endswith(SCORES_END)


@dataclass(frozen=True, slots=True)
class Marker:
    """Commit marker of a round: written last, it makes the round exist.

    `sha256`, `bytes` and `rows` describe the round: with one part they are the part's, with several `sha256` is the
    hash of the parts' hashes in order and the two numbers are sums, of `rows` without scores. The stored marker has its
    own checksum.
    """

    format: int
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
    def from_json(cls, value: JsonObject) -> Marker:
        """Parse a marker. Raises KeyError, TypeError or ValueError when a field is missing or has another type."""
        parts = tuple(Part(str(p["file"]), str(p["sha256"]), int(p["bytes"]), int(p["rows"])) for p in value["parts"])
        if not parts:
            raise ValueError("the marker has no parts")
        return cls(
            format=int(value["format"]),
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


def encode(policy: str, round_index: int, rollouts: Rollouts) -> bytes:
    """Return the Parquet bytes of a part: zstd, page checksums, dictionary encoding for the id columns only."""
    table = rollouts.table().select(SCHEMA.names).combine_chunks()
    for name, value in (("policy", policy), ("round", round_index)):
        field = SCHEMA.field(name)
        table = table.set_column(
            SCHEMA.names.index(name), field, pa.repeat(pa.scalar(value, field.type), len(rollouts))
        )
    return _parquet(table, statistics=["policy", "round", "prompt_id", "reward"])


def encode_scores(scores: Sequence[Score]) -> bytes:
    """Return the Parquet bytes of a source's scores, in their order."""
    rows = [(each.policy, each.prompt_id, each.index, each.ends, each.logprobs) for each in scores]
    columns = zip(*rows, strict=True) if rows else [()] * len(SCORES)
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, SCORES, strict=True)]
    return _parquet(pa.table(arrays, schema=SCORES), statistics=["policy", "prompt_id"])


def _parquet(table: pa.Table, statistics: Sequence[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=["policy", "prompt_id"],
        write_page_checksum=True,
        write_statistics=list(statistics),
        store_schema=False,
    )
    return bytes(sink.getvalue())
