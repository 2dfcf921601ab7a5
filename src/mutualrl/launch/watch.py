"""Watch over one policy's heartbeats: whether it is frozen, or alive without progress."""

from __future__ import annotations

from collections.abc import Callable

from mutualrl.console.display import clean
from mutualrl.recipes.schema import RunSection
from mutualrl.see.liveness import HeartbeatMonitor, Phase
from mutualrl.see.store import Location

START_SECONDS = 300.0  # longest time from the start of a process group to its first heartbeat


class WatchedRun:
    """Watch over a policy with a running process group. `say` is called once with a warning after half of
    `run.step_timeout` without progress."""

    def __init__(self, exchange: Location, policy: str, limits: RunSection, say: Callable[[str], None]) -> None:
        self._policy = policy
        self._limits = limits
        self._say = say
        self._heartbeats = HeartbeatMonitor(exchange)
        self._warned = False

    def frozen_for(self) -> str | None:
        """Return the time that the policy has been frozen, as text, or None if it is not."""
        silent, phase = self._heartbeats.seconds_since(self._policy)
        limit = self._limits.peer_timeout
        if silent <= (max(limit, START_SECONDS) if Phase.NOT_STARTED.is_in(phase) else limit):
            return None
        return f"{silent:.0f} s (last seen: {phase})"

    def stalled_for(self) -> str | None:
        """Return the time and phase of a live policy without progress, as text, or None within `run.step_timeout`."""
        idle, phase = self._heartbeats.seconds_without_progress(self._policy)
        limit = self._limits.step_timeout
        message = f"no progress for {idle:.0f} s in {clean(phase, 200)}"
        if idle > limit:
            return f"{message} (run.step_timeout: {limit:g} s)"
        if idle <= limit / 2:
            self._warned = False
        elif not self._warned:
            self._warned = True
            self._say(f"policy {self._policy!r}: {message}; it is terminated after {limit:g} s (run.step_timeout)")
        return None

    def past_its_start(self) -> bool:
        """Return whether the newest attempt got past its start, so that a failure is a new one."""
        return self._heartbeats.seconds_since(self._policy)[1] not in (Phase.NOT_STARTED, Phase.LOADING)

    def reset(self) -> None:
        """Restart the count of silence at the next check, for a restarted policy."""
        self._heartbeats.reset(self._policy)
