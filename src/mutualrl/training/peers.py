"""One policy's link to its peers: publish a round, wait for the peers' rounds, and report who is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mutualrl.console.lines import notify
from mutualrl.errors import ExchangeDamagedError
from mutualrl.see import Exchange, Heartbeat, MissingPeers, ReadLog, Shard, WaitCallbacks


class PeerRounds(NamedTuple):
    """What a learner reads in a round: the peers' rounds of the same number, and by number the earlier ones that have
    come since it read last (`late`, oldest first); the seconds waited; how many rounds each peer is behind."""

    current: dict[str, Shard]
    late: dict[int, dict[str, Shard]]
    waited: float
    lags: dict[str, int]


@dataclass
class PeerLink:
    """Exchange as one policy uses it.

    `stopping` is asked while it waits; a true answer ends the wait with RoundAbortedError. `missing_peers`: the rounds
    in which the policy continued without a peer. `waited_for`: the seconds that each peer was waited for. `staleness`:
    how many rounds a peer may be behind before it is waited for; `reads`: how far each was read in each round."""

    exchange: Exchange
    peers: Sequence[str]
    heartbeat: Heartbeat | None = None
    stopping: Callable[[], bool] = lambda: False
    missing_peers: MissingPeers = field(default_factory=MissingPeers)
    staleness: int = 0
    reads: ReadLog = field(default_factory=ReadLog)
    wait_seconds: float = 0.0
    waited_for: Counter[str] = field(default_factory=Counter)

    @property
    def policy(self) -> str:
        """Return the policy whose link this is."""
        return self.exchange.policy

    def read(self, round_index: int) -> PeerRounds:
        """Wait until no peer is more than `staleness` rounds behind; return what was not read before, up to this round.

        What is read is written down first, and a round that is planned again reads the same.
        """
        began = time.monotonic()
        if self.staleness == 0:
            current = self._wait(round_index, round_index, self.peers)
            return PeerRounds(current, {}, self._waited(began), dict.fromkeys(current, 0))
        before = {peer: self.last_read(peer, round_index) for peer in self.peers}
        newest = self._newest(round_index, before)
        late: dict[int, dict[str, Shard]] = {}
        for peer, last in newest.items():
            for number in range(max(0, self.first_wanted(peer, round_index)), last + 1):
                late.setdefault(number, {})[peer] = self._reread(peer, number)
        current = late.pop(round_index, {})
        lags = {peer: round_index - last for peer, last in newest.items()}
        return PeerRounds(current, late, self._waited(began), lags)

    def last_read(self, peer: str, round_index: int) -> int:
        """Return the newest round of a peer that was read before a round; -1 for none."""
        read = self.reads.newest(peer, round_index - 1)
        return round_index - 1 if read is None else read

    def first_wanted(self, peer: str, round_index: int) -> int:
        """Return the first round of a peer that a policy that resumes with this round will read."""
        return max(self.last_read(peer, round_index) + 1, round_index - self.staleness)

    def _newest(self, round_index: int, before: dict[str, int]) -> dict[str, int]:
        """Return how far each peer that takes part is read in a round: as far as when it was planned before, else as
        far as there is."""
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
        """Wait, in a round, for a round of some peers; one that is lost is noted and left out."""
        expected = [peer for peer in self._expected(round_index) if peer in peers]
        callbacks = WaitCallbacks(self.set_phase, self._arrived, self._slow, self.stopping)
        shards = self.exchange.wait(expected, number, callbacks)
        for peer in set(expected) - set(shards):
            self.missing_peers.mark_missing(peer, round_index)
            self._warn(f"peer {peer!r} is lost; from round {round_index} on the pool does without it")
        return shards

    def _reread(self, peer: str, number: int) -> Shard:
        """Return a round that is known to be committed."""
        shard = self.exchange.read(peer, number)
        if shard is None:
            raise ExchangeDamagedError(f"{self.exchange.location(peer)}: round {number} was there, and is gone")
        return shard

    def _waited(self, began: float) -> float:
        """End a wait that began then; return its seconds."""
        waited = time.monotonic() - began
        self.set_phase("training")
        self.wait_seconds += waited
        return waited

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Set the policy's phase, which the supervisor and the peers see."""
        if self.heartbeat is not None:
            self.heartbeat.set(phase, step)

    def advance(self) -> None:
        """Record progress within the phase."""
        if self.heartbeat is not None:
            self.heartbeat.advance()

    def _arrived(self, peer: str, seconds: float) -> None:
        self.waited_for[peer] += seconds  # type: ignore[assignment]  # a Counter adds what it is given

    def _slow(self, words: str) -> None:
        self.set_phase(words)
        self._warn(words)

    def _warn(self, words: str) -> None:
        notify(f"policy {self.policy!r}: {words}")
