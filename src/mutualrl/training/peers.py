"""One policy's link to its peers: publish a round, wait for the peers' rounds, and report which peers it waits for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from mutualrl.console.lines import notify
from mutualrl.errors import ExchangeDamagedError
from mutualrl.see import Exchange, Heartbeat, MissingPeers, ReadLog, Shard, WaitCallbacks
from mutualrl.see.liveness import Phase

Meanwhile = Callable[[Mapping[str, Shard]], None]  # called with the rounds that have arrived


class PeerRounds(NamedTuple):
    """Peers' rounds that a learner reads in one round: those of the same number (`current`); earlier rounds published
    since its last read, by number, oldest first (`late`); seconds waited; rounds that each peer is behind (`lags`);
    the sources' of the same number (`sources`)."""

    current: dict[str, Shard]
    late: dict[int, dict[str, Shard]]
    waited: float
    lags: dict[str, int]
    sources: Mapping[str, Shard] = MappingProxyType({})


@dataclass
class PeerLink:
    """One policy's view of the exchange.

    `stopping` is polled during a wait; True ends the wait with RoundAbortedError. `missing_peers`: the rounds in
    which the policy continued without a peer. `waited_for`: seconds waited per peer; `arrivals`: those of the last
    read. `staleness`: how many rounds a peer may be behind before the policy waits for it; `reads`: the newest
    round read of each peer, by round. `how_to_start`: for a user who has started only this policy, of peers that are
    not `asked` sources."""

    exchange: Exchange
    peers: Sequence[str]
    heartbeat: Heartbeat | None = None
    stopping: Callable[[], bool] = lambda: False
    missing_peers: MissingPeers = field(default_factory=MissingPeers)
    staleness: int = 0
    reads: ReadLog = field(default_factory=ReadLog)
    how_to_start: str = ""
    asked: Collection[str] = ()
    wait_seconds: float = 0.0
    waited_for: Counter[str] = field(default_factory=Counter)
    arrivals: dict[str, float] = field(default_factory=dict)
    _meanwhile: Meanwhile = lambda arrived: None

    @property
    def policy(self) -> str:
        """Return the policy that owns this link."""
        return self.exchange.policy

    def read(
        self, round_index: int, meanwhile: Callable[[Mapping[str, Shard]], None] = lambda arrived: None
    ) -> PeerRounds:
        """Wait until no peer is more than `staleness` rounds behind; return all unread rounds, up to this round.

        `meanwhile`: called between polls with the rounds that have arrived. Reads are logged before they are used, so
        that a round that is planned again reads the same.
        """
        began = time.monotonic()
        self._meanwhile = meanwhile
        self.arrivals = {}
        if self.staleness == 0:
            current = self._wait(round_index, round_index, self.peers)
            return PeerRounds(current, {}, self._waited(began), dict.fromkeys(current, 0))
        before = {peer: self.last_read(peer, round_index) for peer in self.peers}
        newest = self._newest(round_index, before)
        late: dict[int, dict[str, Shard]] = {}
        for peer, last in newest.items():
            for number in range(max(0, self.first_needed(peer, round_index)), last + 1):
                late.setdefault(number, {})[peer] = self._reread(peer, number)
        current = late.pop(round_index, {})
        lags = {peer: round_index - last for peer, last in newest.items()}
        return PeerRounds(current, late, self._waited(began), lags)

    def waited_only_for(self, source: str, sources: Collection[str]) -> float:
        """Return the seconds of the last read in which all peers but sources had arrived, and this source had not."""
        others = [seconds for peer, seconds in self.arrivals.items() if peer not in sources]
        return max(0.0, self.arrivals.get(source, 0.0) - max(others, default=0.0))

    def last_read(self, peer: str, round_index: int) -> int:
        """Return the newest round of a peer read before a given round; -1 for none."""
        read = self.reads.newest(peer, round_index - 1)
        return round_index - 1 if read is None else read

    def first_needed(self, peer: str, round_index: int) -> int:
        """Return the first round of a peer to be read by a policy that resumes with this round."""
        return max(self.last_read(peer, round_index) + 1, round_index - self.staleness)

    def _newest(self, round_index: int, before: dict[str, int]) -> dict[str, int]:
        """Return the newest round to read of each participating peer: as logged if the round was planned before, else
        the newest published."""
        if self.reads.newest("", round_index) is not None:  # planned before
            planned = {peer: self.reads.newest(peer, round_index) or 0 for peer in self._expected(round_index)}
            for number in sorted(set(planned.values())):
                if number >= 0:
                    self._wait(round_index, number, [peer for peer, last in planned.items() if last == number])
            return {peer: last for peer, last in planned.items() if peer in self._expected(round_index)}
        oldest = round_index - self.staleness
        self._wait(round_index, oldest, [peer for peer, last in before.items() if last < oldest])
        newest = {}
        for peer in self._expected(round_index):
            newest[peer] = max(before[peer], oldest)
            while newest[peer] < round_index and self.exchange.marker_of(peer, newest[peer] + 1) is not None:
                newest[peer] += 1
        self.reads.write(round_index, newest)
        return newest

    def _expected(self, round_index: int) -> list[str]:
        return [peer for peer in self.peers if not self.missing_peers.is_missing(peer, round_index)]

    def _wait(self, round_index: int, number: int, peers: Sequence[str]) -> dict[str, Shard]:
        """Wait, in a round, for a round of some peers; a lost peer is recorded as missing and left out."""
        expected = [peer for peer in self._expected(round_index) if peer in peers]
        callbacks = WaitCallbacks(
            self.set_phase, self._arrived, self._absent, self._slow, self.stopping, meanwhile=self._meanwhile
        )
        shards = self.exchange.wait(expected, number, callbacks)
        for peer in set(expected) - set(shards):
            self.missing_peers.mark_missing(peer, round_index)
            self._warn(f"peer {peer!r} is lost; the pool continues without it from round {round_index} on")
        return shards

    def _reread(self, peer: str, number: int) -> Shard:
        """Return a round that was committed."""
        shard = self.exchange.read(peer, number)
        if shard is None:
            raise ExchangeDamagedError(
                f"{self.exchange.location(peer)}: round {number} was committed and no longer exists"
            )
        return shard

    def _waited(self, began: float) -> float:
        """End a wait that started at `began`; return its seconds."""
        waited = time.monotonic() - began
        self.set_phase(Phase.TRAINING)
        self.wait_seconds += waited
        return waited

    def set_phase(self, phase: str, step: int | None = None, *, at_once: bool = False) -> None:
        """Set the policy's phase, as published to the supervisor and the peers."""
        if self.heartbeat is not None:
            self.heartbeat.set(phase, step, at_once=at_once)

    def advance(self) -> None:
        """Record progress within the phase."""
        if self.heartbeat is not None:
            self.heartbeat.advance()

    def _arrived(self, peer: str, seconds: float) -> None:
        self.arrivals[peer] = self.arrivals.get(peer, 0.0) + seconds
        self.waited_for[peer] += seconds  # type: ignore[assignment]  # a Counter of floats

    def _absent(self, peers: Sequence[str]) -> None:
        """Say for whom a script waits and how to start it; a command's supervisor has started the peers itself."""
        startable = [peer for peer in peers if peer not in self.asked]
        if self.how_to_start and startable:
            self._warn(f"waiting for {', '.join(startable)}, which has published nothing yet. {self.how_to_start}")

    def _slow(self, message: str) -> None:
        self.set_phase(message)
        self._warn(message)

    def _warn(self, message: str) -> None:
        notify(f"policy {self.policy!r}: {message}")
