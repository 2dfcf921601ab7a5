"""What lies in the exchange of a run: rounds, bytes, gaps, damage. Reads files alone; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import ExchangeDamagedError
from mutualrl.see.exchange import Exchange
from mutualrl.see.files import PART_NAME
from mutualrl.see.shard import Shard
from mutualrl.see.store import ExchangeStore, open_store


@dataclass
class PolicySurvey:
    """One policy's directory. `gaps`: rounds missing between the first and the last that are there; `freed`: how many
    before the first were deleted; `damaged`: what is wrong, each with its file; `stray`: parts that no marker names (a
    writer died before it committed them, or an older attempt's), which no reader looks at."""

    policy: str
    rounds: list[int] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    gaps: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)

    @property
    def freed(self) -> int:
        """Rounds before the first that is there."""
        return self.rounds[0] if self.rounds else 0

    def to_json(self) -> dict[str, object]:
        """Everything, with the rounds as first and last."""
        return {
            "policy": self.policy,
            "rounds": len(self.rounds),
            "first": self.rounds[0] if self.rounds else None,
            "last": self.rounds[-1] if self.rounds else None,
            "rows": self.rows,
            "bytes": self.bytes,
            "gaps": self.gaps,
            "freed": self.freed,
            "damaged": self.damaged,
            "stray": self.stray,
        }


def writers(exchange: Path | ExchangeStore) -> list[str]:
    """Return the policies that have a namespace in the exchange."""
    return open_store(exchange).policies()


def survey(exchange: Path | ExchangeStore, run_id: str, policy: str, *, verify: bool) -> PolicySurvey:
    """Look at a policy's rounds: at their markers, and with `verify` at every byte of every part."""
    reader = Reader(exchange, run_id)
    found = PolicySurvey(policy, reader.rounds(policy))
    named: set[str] = set()
    for round_ in list(found.rounds):
        try:
            marker = reader.marker_of(policy, round_)
            if marker is None:  # a running policy has freed it meanwhile
                found.rounds.remove(round_)
                continue
            named |= {part.file for part in marker.parts}
            found.rows += marker.rows
            found.bytes += marker.bytes
            if verify and (shard := reader.read(policy, round_)) is not None:
                decode(shard)
        except ExchangeDamagedError as error:
            found.damaged.append(str(error))
    parts = {name for name in reader.store.names(policy) if PART_NAME.fullmatch(name)}
    found.stray = sorted(parts - named) if not found.damaged else []
    if found.rounds:
        found.gaps = sorted(set(range(found.rounds[0], found.rounds[-1] + 1)) - set(found.rounds))
    return found


class Reader(Exchange):
    """A door to a run's exchange that only reads: it is no policy's."""

    def __init__(self, exchange: Path | ExchangeStore, run_id: str) -> None:
        super().__init__(exchange, "", run_id)


def decode(shard: Shard) -> pa.Table:
    """Every column of a shard. Raises ExchangeDamagedError when the bytes, though they match, cannot be decoded."""
    try:
        return shard.table()
    except (pa.ArrowException, OSError) as error:
        raise ExchangeDamagedError(f"policy {shard.policy!r}, round {shard.marker.round}: {error}") from None


def tables(
    exchange: Path | ExchangeStore, run_id: str, policies: list[str], rounds: range | None = None
) -> Iterator[pa.Table]:
    """The records of every committed round (among `rounds`), round by round, policies in order. Damage raises
    ExchangeDamagedError."""
    reader = Reader(exchange, run_id)
    every = {policy: set(reader.rounds(policy)) for policy in policies}
    for round_ in sorted(set().union(*every.values())):
        if rounds is not None and round_ not in rounds:
            continue
        for policy in policies:
            if round_ in every[policy] and (shard := reader.read(policy, round_)) is not None:
                yield decode(shard)


def export(exchange: Path | ExchangeStore, run_id: str, policies: list[str], target: Path) -> int:
    """Write all records into one Parquet or JSONL file, by its ending, under another name first; returns their
    number."""
    temporary = target.with_name(f".{target.name}.tmp")
    rows = 0
    try:
        if target.suffix == ".parquet":
            writer: pq.ParquetWriter | None = None
            for table in tables(exchange, run_id, policies):
                writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd")
                writer.write_table(table)
                rows += len(table)
            if writer is not None:
                writer.close()
        else:
            rows = _export_lines(exchange, run_id, policies, temporary)
        if rows:
            temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _export_lines(exchange: Path | ExchangeStore, run_id: str, policies: list[str], target: Path) -> int:
    rows = 0
    with target.open("w", encoding="utf-8") as file:
        for table in tables(exchange, run_id, policies):
            for record in table.to_pylist():
                file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")
            rows += len(table)
    return rows


def _plain(record: dict[str, Any]) -> dict[str, object]:
    """JSON has no NaN: an unscorable reward is null."""
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in record.items()}
