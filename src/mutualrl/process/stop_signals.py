"""SIGINT and SIGTERM as requests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mutualrl.errors import RunInterruptedError


class StopSignals:
    """SIGINT and SIGTERM received by this process: the first requests a checkpoint, the second an immediate end."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def name(self) -> str:
        """Return the first signal's name."""
        return signal.Signals(self.received[0]).name

    def raise_if_any(self) -> None:
        """Raise RunInterruptedError if a signal was received."""
        if self.received:
            raise RunInterruptedError(f"stopped by {self.name}")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Install handlers for SIGINT and SIGTERM and yield their record. (Background jobs inherit SIGINT as ignored.)"""
    signals = StopSignals()

    def handler(number: int, frame: FrameType | None) -> None:
        signals.received.append(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
