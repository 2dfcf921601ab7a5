"""Retention: which rounds may be deleted from the exchange, and their deletion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mutualrl.see.files import committed_rounds, round_of
from mutualrl.see.store import ExchangeStore, Location, open_store
from mutualrl.storage.checkpoints import oldest_needed
from mutualrl.storage.files import checksummed_bytes, parse_or_none

#: object in a policy's namespace with the first round that its checkpoints still need
CURSOR = "cursor.json"


def publish_cursor(store: ExchangeStore, policy: str, run_id: str, needed: int) -> None:
    """Publish the first round that a policy needs when it resumes from its oldest checkpoint, for policies that do not
    see its run directory."""
    store.put(policy, CURSOR, checksummed_bytes({"run_id": run_id, "round": needed}))


def published_need(store: ExchangeStore, policies: Iterable[str], run_id: str) -> int:
    """Return the first round that any policy of a run has said to need; 0 while one has not said it."""
    needs = []
    for policy in policies:
        data = store.get(policy, CURSOR)
        cursor = None if data is None else parse_or_none(data)
        if cursor is None or cursor.get("run_id") != run_id or not isinstance(cursor.get("round"), int):
            return 0
        needs.append(max(cursor["round"], 0))
    return min(needs, default=0)


def first_needed(
    store: ExchangeStore, run_id: str, roots: Mapping[str, Path], staleness: int, *, elsewhere: bool
) -> int:
    """Return the first round that a policy of a run may still read, by the checkpoints in the policies' directories
    (`roots`, by name); by what each has published if some train `elsewhere`."""
    if elsewhere:
        return published_need(store, roots, run_id)
    return oldest_needed(list(roots.values()), staleness)


def deletable(rounds: Iterable[int], needed: int, keep: int) -> list[int]:
    """Return the rounds that may be deleted: older than `needed`, the first round that a policy may still read, and
    not among the newest `keep`."""
    ordered = sorted(rounds)
    return [round_index for round_index in ordered[: max(len(ordered) - keep, 0)] if round_index < needed]


def prune_rounds(
    exchange: Location, policy: str, needed: int, keep: int, *, dry_run: bool = False
) -> tuple[list[int], int]:
    """Delete a policy's deletable rounds; return them and their size in bytes. Markers are deleted first, so that a
    round is complete or absent."""
    store = open_store(exchange)
    rounds = deletable(committed_rounds(store, policy), needed, keep)
    if not rounds:
        return [], 0
    to_delete = set(rounds)
    names = [name for name in store.names(policy) if round_of(name) in to_delete]
    size = sum(store.size(policy, name) for name in names)
    if not dry_run:
        store.delete(policy, [name for name in names if name.endswith(".json")])
        store.delete(policy, [name for name in names if not name.endswith(".json")])
    return rounds, size
