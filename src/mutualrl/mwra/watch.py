"""Watch over one policy's heartbeats: whether it is frozen, or lives and makes no progress."""

from __future__ import annotations

from collections.abc import Callable

from mutualrl.console.display import clean
from mutualrl.recipes.schema import RunSection
from mutualrl.see.liveness import LOADING, NOT_STARTED, HeartbeatMonitor
from mutualrl.see.store import Location

START_SECONDS = 300.0  # from the start of a process group to its first heartbeat, at most


class Watch:
    """Watch over a policy whose process group runs. `say` is called once with a warning when there is no
    progress for half of `run.step_timeout`."""

    def __init__(self, exchange: Location, policy: str, limits: RunSection, say: Callable[[str], None]) -> None:
        self._policy = policy
        self._limits = limits
        self._say = say
        self._heartbeats = HeartbeatMonitor(exchange)
        self._warned = False

    def frozen_for(self) -> str | None:
        """Return how long the policy has been frozen, as text; None while it is not."""
        silent, phase = self._heartbeats.seconds_since(self._policy)
        limit = self._limits.peer_timeout
        if silent <= (max(limit, START_SECONDS) if phase.startswith(NOT_STARTED) else limit):
            return None
        return f"{silent:.0f} s (last seen: {phase})"

    def stalled_for(self) -> str | None:
        """Return for how long a policy that lives has made no progress, and in what, as text; None while it makes
        some."""
        idle, phase = self._heartbeats.seconds_without_progress(self._policy)
        limit = self._limits.step_timeout
        words = f"no progress for {idle:.0f} s in {clean(phase, 200)}"
        if idle > limit:
            return f"{words} (run.step_timeout: {limit:g} s)"
        if idle <= limit / 2:
            self._warned = False
        elif not self._warned:
            self._warned = True
            self._say(f"policy {self._policy!r}: {words}; it is ended after {limit:g} s (run.step_timeout)")
        return None

    def past_its_start(self) -> bool:
        """Return whether the newest attempt got further than its start: its trouble is new then."""
        return self._heartbeats.seconds_since(self._policy)[1] not in (NOT_STARTED, LOADING)

    def reset(self) -> None:
        """Count silence from the next check on: the policy is restarted."""
        self._heartbeats.reset(self._policy)
