"""Fake clock: sleeping takes no time, and scheduled actions run at their second."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Replacement of the module `time` in the exchange, heartbeats and statuses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._actions: list[tuple[float, float | None, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock, and run the actions that came due."""
        self.now += seconds
        for entry in [e for e in self._actions if e[0] <= self.now]:
            self._actions.remove(entry)
            due, interval, action = entry
            action()
            if interval is not None:
                self._actions.append((due + interval, interval, action))

    def stop(self) -> None:
        """Drop all scheduled actions, as if their process had died."""
        self._actions.clear()

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` after `seconds`."""
        self._actions.append((self.now + seconds, None, action))

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` every `seconds`."""
        self._actions.append((self.now + seconds, seconds, action))
