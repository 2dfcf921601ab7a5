"""Requests to stop: a signal to this process, or the run's stop file, which the supervisor writes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from mutualrl.errors import RunInterruptedError


class StopRequest:
    """Request to stop a worker; true once it was made.

    While it trains (`graceful`), the first signal is noted, so that it can save a checkpoint at the end of its step,
    and the second ends it; at other times the first ends it, since there is nothing to save."""

    def __init__(self, file: Path) -> None:
        self.graceful = False
        self._file = file
        self._signal: str | None = None

    def install(self) -> None:
        """Take SIGINT and SIGTERM. Explicitly: a job started in the background inherits SIGINT as ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None or not self.graceful:
            raise RunInterruptedError(f"stopped by {signal.Signals(number).name}")
        self._signal = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self._signal is not None or self._file.exists()
