"""A clock for what waits: sleeping takes no time, and things happen at their second."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Stands in for the module `time` where the exchange, heartbeats and statuses read it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._actions: list[tuple[float, float | None, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass; run what was due meanwhile."""
        self.now += seconds
        for entry in [e for e in self._actions if e[0] <= self.now]:
            self._actions.remove(entry)
            due, interval, action = entry
            action()
            if interval is not None:
                self._actions.append((due + interval, interval, action))

    def stop(self) -> None:
        """Drop everything that was still to happen: who did it has died."""
        self._actions.clear()

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` so many seconds from now."""
        self._actions.append((self.now + seconds, None, action))

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Run `action` again and again."""
        self._actions.append((self.now + seconds, seconds, action))
