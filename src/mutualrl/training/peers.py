"""One policy's link to its peers: publish a round, wait for the peers' rounds, and report who is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mutualrl.console.lines import notify
from mutualrl.see import Exchange, Heartbeat, MissingPeers, Shard, WaitCallbacks


@dataclass
class PeerLink:
    """Exchange as one policy uses it.

    `stopping` is asked while it waits; a true answer ends the wait with RoundAbortedError. `missing_peers`: the rounds
    in which the policy went on without a peer. `waited_for`: the seconds that each peer was waited for."""

    exchange: Exchange
    peers: Sequence[str]
    heartbeat: Heartbeat | None = None
    stopping: Callable[[], bool] = lambda: False
    missing_peers: MissingPeers = field(default_factory=MissingPeers)
    wait_seconds: float = 0.0
    waited_for: Counter[str] = field(default_factory=Counter)

    @property
    def policy(self) -> str:
        """Return the policy whose link this is."""
        return self.exchange.policy

    def read(self, round_index: int) -> tuple[dict[str, Shard], float]:
        """Wait for the round of every peer; return them by name, and the seconds waited."""
        began = time.monotonic()
        expected = [peer for peer in self.peers if not self.missing_peers.is_missing(peer, round_index)]
        callbacks = WaitCallbacks(self.set_phase, self._arrived, self._slow, self.stopping)
        shards = self.exchange.wait(expected, round_index, callbacks)
        for peer in set(expected) - set(shards):
            self.missing_peers.mark_missing(peer, round_index)
            self._warn(f"peer {peer!r} is lost; from round {round_index} on the pool does without it")
        waited = time.monotonic() - began
        self.set_phase("training")
        self.wait_seconds += waited
        return shards, waited

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Say what the policy is doing, where the supervisor and the peers see it."""
        if self.heartbeat is not None:
            self.heartbeat.set(phase, step)

    def advance(self) -> None:
        """Say that the policy has got on with what it is doing."""
        if self.heartbeat is not None:
            self.heartbeat.advance()

    def _arrived(self, peer: str, seconds: float) -> None:
        self.waited_for[peer] += seconds  # type: ignore[assignment]  # a Counter adds what it is given

    def _slow(self, words: str) -> None:
        self.set_phase(words)
        self._warn(words)

    def _warn(self, words: str) -> None:
        notify(f"policy {self.policy!r}: {words}")
