"""Inspection of a run's exchange: rounds, bytes, gaps, damage. Reads files only; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import ExchangeDamagedError
from mutualrl.see.exchange import Exchange
from mutualrl.see.files import PART_NAME
from mutualrl.see.shard import Shard
from mutualrl.see.store import Location, open_store
from mutualrl.storage.files import JsonObject


@dataclass
class PolicyInspection:
    """Inspection of one policy's namespace. `gaps`: rounds missing between the first and the last present; `pruned`:
    number of deleted rounds before the first; `damaged`: problems, each with its file; `orphaned`: parts that no marker
    names (never committed, or of an older attempt), which are not read."""

    policy: str
    rounds: list[int] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    gaps: list[int] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)

    @property
    def pruned(self) -> int:
        """Return the number of rounds before the first present."""
        return self.rounds[0] if self.rounds else 0

    def to_json(self) -> dict[str, object]:
        """Return all fields, with the rounds as their number, first and last."""
        return {
            "policy": self.policy,
            "rounds": len(self.rounds),
            "first": self.rounds[0] if self.rounds else None,
            "last": self.rounds[-1] if self.rounds else None,
            "rows": self.rows,
            "bytes": self.bytes,
            "gaps": self.gaps,
            "pruned": self.pruned,
            "damaged": self.damaged,
            "orphaned": self.orphaned,
        }


def writers(exchange: Location) -> list[str]:
    """Return the policies that have a namespace in the exchange."""
    return open_store(exchange).policies()


def inspect_policy(exchange: Location, run_id: str, policy: str, *, verify: bool) -> PolicyInspection:
    """Inspect a policy's rounds: their markers, and with `verify` every byte of every part."""
    reader = Reader(exchange, run_id)
    inspection = PolicyInspection(policy, reader.rounds(policy))
    named: set[str] = set()
    for round_index in list(inspection.rounds):
        try:
            marker = reader.marker_of(policy, round_index)
            if marker is None:  # pruned by a running policy since the listing
                inspection.rounds.remove(round_index)
                continue
            named |= {part.file for part in marker.parts}
            inspection.rows += marker.rows
            inspection.bytes += marker.bytes
            if verify and (shard := reader.read(policy, round_index)) is not None:
                decode(shard)
        except ExchangeDamagedError as error:
            inspection.damaged.append(str(error))
    parts = {name for name in reader.store.names(policy) if PART_NAME.fullmatch(name)}
    inspection.orphaned = sorted(parts - named) if not inspection.damaged else []
    if inspection.rounds:
        inspection.gaps = sorted(set(range(inspection.rounds[0], inspection.rounds[-1] + 1)) - set(inspection.rounds))
    return inspection


class Reader(Exchange):
    """Read-only view of a run's exchange, not of a particular policy."""

    def __init__(self, exchange: Location, run_id: str) -> None:
        super().__init__(exchange, "", run_id)


def decode(shard: Shard) -> pa.Table:
    """Return every column of a shard. Raises ExchangeDamagedError if bytes that match their hash cannot be decoded."""
    try:
        return shard.table()
    except (pa.ArrowException, OSError) as error:
        raise ExchangeDamagedError(f"policy {shard.policy!r}, round {shard.marker.round}: {error}") from None


def tables(exchange: Location, run_id: str, policies: list[str], rounds: range | None = None) -> Iterator[pa.Table]:
    """Yield the records of every committed round (in `rounds`), round by round, policies in order. Raises
    ExchangeDamagedError."""
    reader = Reader(exchange, run_id)
    rounds_of = {policy: set(reader.rounds(policy)) for policy in policies}
    for round_index in sorted(set().union(*rounds_of.values())):
        if rounds is not None and round_index not in rounds:
            continue
        for policy in policies:
            if round_index in rounds_of[policy] and (shard := reader.read(policy, round_index)) is not None:
                yield decode(shard)


def export(exchange: Location, run_id: str, policies: list[str], target: Path) -> int:
    """Write all records into one Parquet or JSONL file, by its suffix, through a temporary file; return their
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


def _export_lines(exchange: Location, run_id: str, policies: list[str], target: Path) -> int:
    rows = 0
    with target.open("w", encoding="utf-8") as file:
        for table in tables(exchange, run_id, policies):
            for record in table.to_pylist():
                file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")
            rows += len(table)
    return rows


def _plain(record: JsonObject) -> dict[str, object]:
    """Replace NaN, which JSON lacks, by None: an unscorable reward is null."""
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in record.items()}
