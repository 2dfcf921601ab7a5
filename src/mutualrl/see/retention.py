"""Retention: which rounds may be deleted from the exchange, and their deletion."""

from __future__ import annotations

from collections.abc import Iterable

from mutualrl.see.files import committed_rounds, round_of
from mutualrl.see.store import Location, open_store


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
