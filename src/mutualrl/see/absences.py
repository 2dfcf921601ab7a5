"""In which rounds a learner went on without a peer. Kept on disk, so that a replayed round is the round that was."""

from __future__ import annotations

from mutualrl.see.store import ExchangeStore
from mutualrl.storage.files import parse_sealed, sealed_bytes

FILE = "absences.json"


class Absences:
    """Intervals of rounds [first, end) for each lost peer; `end` is None while it is away. In memory alone without a
    store."""

    def __init__(self, store: ExchangeStore | None = None, policy: str = "") -> None:
        self._store = store
        self._policy = policy
        data = None if store is None else store.get(policy, FILE)
        stored = None if data is None or store is None else parse_sealed(data, store.describe(policy, FILE))
        self._intervals: dict[str, list[list[int | None]]] = {} if stored is None else stored["peers"]

    def absent(self, peer: str, round_: int) -> bool:
        """Whether the learner did, or does, this round without the peer."""
        return any(
            first is not None and first <= round_ and (end is None or round_ < end)
            for first, end in self._intervals.get(peer, ())
        )

    def away(self) -> dict[str, int]:
        """The peers that are away now, and since which round."""
        return {
            peer: first
            for peer, intervals in self._intervals.items()
            for first, end in intervals
            if end is None and first is not None
        }

    def lose(self, peer: str, round_: int) -> None:
        """From `round_` on the learner does without the peer. Durable before this returns."""
        self._intervals.setdefault(peer, []).append([round_, None])
        self._write()

    def welcome_back(self, round_: int) -> None:
        """A resumed run starts every policy again: from `round_` on all peers are waited for."""
        for peer, intervals in self._intervals.items():
            self._intervals[peer] = [[first, round_ if end is None else end] for first, end in intervals]
        if self._intervals:
            self._write()

    def _write(self) -> None:
        if self._store is not None:
            self._store.put(self._policy, FILE, sealed_bytes({"peers": self._intervals}))
