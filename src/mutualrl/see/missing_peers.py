"""Rounds in which a learner continued without a peer. Stored, so that a replayed round leaves out the same peers."""

from __future__ import annotations

from mutualrl.errors import ExchangeDamagedError, FileDamagedError
from mutualrl.see.store import ExchangeStore, reread
from mutualrl.storage.files import checksummed_bytes, parse_checksummed

FILE = "missing_peers.json"


class MissingPeers:
    """Intervals of rounds [first, end) for each lost peer; `end` is None while it is missing. In memory only without a
    store."""

    def __init__(self, store: ExchangeStore | None = None, policy: str = "") -> None:
        self._store = store
        self._policy = policy
        self._intervals: dict[str, list[list[int | None]]] = (
            {} if store is None else reread(store, lambda: _stored(store, policy))
        )

    def is_missing(self, peer: str, round_index: int) -> bool:
        """Return whether the learner runs, or ran, this round without the peer."""
        return any(
            first is not None and first <= round_index and (end is None or round_index < end)
            for first, end in self._intervals.get(peer, ())
        )

    def current(self) -> dict[str, int]:
        """Return the peers that are missing now, with the first round of each absence."""
        return {
            peer: first
            for peer, intervals in self._intervals.items()
            for first, end in intervals
            if end is None and first is not None
        }

    def mark_missing(self, peer: str, round_index: int) -> None:
        """Mark a peer as missing from `round_index` on. Durable before this returns."""
        self._intervals.setdefault(peer, []).append([round_index, None])
        self._write()

    def readmit_all(self, round_index: int) -> None:
        """Expect all peers again from `round_index` on: a resumed run restarts every policy."""
        for peer, intervals in self._intervals.items():
            self._intervals[peer] = [[first, round_index if end is None else end] for first, end in intervals]
        if self._intervals:
            self._write()

    def _write(self) -> None:
        if self._store is not None:
            self._store.put(self._policy, FILE, checksummed_bytes({"policy": self._policy, "peers": self._intervals}))


def _stored(store: ExchangeStore, policy: str) -> dict[str, list[list[int | None]]]:
    """Return the intervals that a policy stored, or an empty dict."""
    data = store.get(policy, FILE)
    if data is None:
        return {}
    where = store.describe(policy, FILE)
    try:
        stored = parse_checksummed(data, where)
    except FileDamagedError as error:
        raise ExchangeDamagedError(str(error)) from None
    owner = stored.get("policy")
    if owner != policy or not isinstance(stored.get("peers"), dict):
        raise ExchangeDamagedError(f"{where}: not the missing peers of policy {policy!r} (found policy {owner!r})")
    intervals: dict[str, list[list[int | None]]] = stored["peers"]
    return intervals
