"""Newest round that a learner had read of each peer when it planned a round, where peers may be stale. Stored, so that
a replayed round reads the same shards."""

from __future__ import annotations

from mutualrl.errors import ExchangeDamagedError, FileDamagedError
from mutualrl.see.store import ExchangeStore, reread
from mutualrl.storage.files import checksummed_bytes, parse_checksummed

FILE = "reads.json"


class ReadLog:
    """Lag of each peer in each planned round: the learner's round minus the peer's newest round that it had read.

    A lag of 0 is a peer that kept up; a lag of r + 1 in round r is a peer of which no round was read yet. Stored as the
    rounds at which a lag changed. In memory only without a store.
    """

    def __init__(self, store: ExchangeStore | None = None, policy: str = "") -> None:
        self._store = store
        self._policy = policy
        self._through = -1  # newest planned round
        self._changes: dict[str, list[list[int]]] = {}
        if store is not None:
            self._through, self._changes = reread(store, lambda: _stored(store, policy))

    def newest(self, peer: str, round_index: int) -> int | None:
        """Return the newest round of a peer that was read when this round was planned, -1 for none; None if the round
        is not planned yet."""
        if round_index > self._through:
            return None
        if round_index < 0:
            return -1
        lag = 0
        for first, new_lag in self._changes.get(peer, ()):
            if first <= round_index:
                lag = new_lag
        return round_index - lag

    def write(self, round_index: int, newest: dict[str, int]) -> None:
        """Record the newest round read of each peer in a round. Durable before this returns. Raises ValueError if the
        round was planned before."""
        if round_index <= self._through:
            raise ValueError(f"round {round_index} was planned before; the newest planned round is {self._through}")
        for peer, read in newest.items():
            before = self.newest(peer, round_index - 1)
            lag, lag_before = round_index - read, 0 if before is None else round_index - 1 - before
            if lag != lag_before:
                self._changes.setdefault(peer, []).append([round_index, lag])
        self._through = round_index
        if self._store is not None:
            content = {"policy": self._policy, "through": self._through, "lags": self._changes}
            self._store.put(self._policy, FILE, checksummed_bytes(content))


def _stored(store: ExchangeStore, policy: str) -> tuple[int, dict[str, list[list[int]]]]:
    """Return a policy's stored newest planned round (-1: none) and the changes of each peer's lag."""
    data, where = store.get(policy, FILE), store.describe(policy, FILE)
    if data is None:
        return -1, {}
    try:
        stored = parse_checksummed(data, where)
    except FileDamagedError as error:
        raise ExchangeDamagedError(str(error)) from None
    through, lags = stored.get("through"), stored.get("lags")
    if stored.get("policy") != policy or not isinstance(through, int) or not isinstance(lags, dict):
        raise ExchangeDamagedError(f"{where}: not the read log of policy {policy!r}")
    return through, lags
