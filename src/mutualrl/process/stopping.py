"""Stop requests: a signal to this process, or the run's stop file, which the supervisor writes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

from mutualrl.errors import RunInterruptedError


class StopRequest:
    """Request to stop a worker; true once made.

    During training (`graceful`), the first signal is recorded, so that the worker can save a checkpoint at the end of
    its step, and the second ends it; at other times the first ends it, since there is nothing to save."""

    def __init__(self, file: Path) -> None:
        self.graceful = False
        self._file = file
        self._signal: str | None = None

    def install(self) -> None:
        """Handle SIGINT and SIGTERM; explicitly, since a background job inherits SIGINT as ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None or not self.graceful:
            raise RunInterruptedError(f"stopped by {signal.Signals(number).name}")
        self._signal = signal.Signals(number).name

    def __bool__(self) -> bool:
        return self._signal is not None or self._file.exists()
