"""Contract that every exchange store must fulfil."""

from __future__ import annotations

import pytest

from mutualrl.errors import FencedError
from mutualrl.records import Rollout
from mutualrl.see import Exchange, ExchangeStore, MissingPeers
from mutualrl.see.inspection import inspect_policy, writers
from mutualrl.see.retention import prune_rounds
from mutualrl.trajectory import Trajectory

ROWS = [Rollout("p", n, float(n), True, trajectory=Trajectory.of_text(f"text {n}")) for n in range(3)]


def check_objects(store: ExchangeStore) -> None:
    """Put, create once, swap, list and delete objects."""
    assert store.get("bob", "a") is None
    assert (store.names("bob"), store.size("bob", "a")) == ([], 0)
    assert store.create("bob", "a", b"1")
    assert not store.create("bob", "a", b"2")
    assert store.get("bob", "a") == b"1"
    assert not store.swap("bob", "a", b"2", b"3")
    assert store.swap("bob", "a", b"1", b"3")
    assert not store.swap("bob", "b", b"1", b"3")
    store.put("bob", "a", b"four")
    store.put("bob", "b", b"5", durable=False)
    assert (sorted(store.names("bob")), store.policies(), store.size("bob", "a")) == (["a", "b"], ["bob"], 4)
    store.delete("bob", ["a", "gone"])
    assert store.names("bob") == ["b"]


def check_exchange(store: ExchangeStore) -> None:
    """Publish, read, fence, replace, inspect and prune rounds, and record missing peers."""
    bob, ada = (Exchange(store, name, "run") for name in ("bob", "ada"))
    bob.claim()
    marker = bob.publish(0, ROWS, 0)
    assert bob.publish(0, ROWS, 0) == marker  # publishing again changes nothing
    shard = ada.wait(["bob"], 0)["bob"]
    assert shard.texts([0, 2]) == ["text 0", "text 2"]
    newer = Exchange(store, "bob", "run", attempt=1)
    newer.claim()
    with pytest.raises(FencedError):
        bob.publish(1, ROWS, 1)
    newer.publish(0, ROWS[:1], 0)  # a restart replaces the round
    replaced = ada.read("bob", 0)
    assert replaced is not None
    assert (len(replaced), replaced.marker.attempt) == (1, 1)
    newer.publish(1, ROWS, 1)

    result = inspect_policy(store, "run", "bob", verify=True)
    assert (result.rounds, result.damaged, result.orphaned) == ([0, 1], [], ["000000.parquet"])
    assert prune_rounds(store, "bob", 1, 1)[0] == [0]
    assert ada.rounds("bob") == [1]
    assert writers(store) == ["bob"]

    missing_peers = MissingPeers(store, "ada")
    missing_peers.mark_missing("bob", 2)
    assert MissingPeers(store, "ada").is_missing("bob", 5)
