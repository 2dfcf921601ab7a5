"""Thread that does something every few seconds beside a process's work."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mutualrl.console.lines import notify
from mutualrl.errors import DiskError, MachineError


class Repeater:
    """Thread that calls `action` now, every `interval` seconds, and at its end. Where it fails for want of a disk or a
    store, one warning is printed, and the next call may succeed."""

    def __init__(self, what: str, action: Callable[[], object], interval: float) -> None:
        self._what = what
        self._action = action
        self._interval = interval
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)

    def start(self) -> None:
        """Call the action, and start the thread. Starting again changes nothing."""
        if self._thread.ident is None:
            self._call()
            self._thread.start()

    def stop(self) -> None:
        """End the thread, when what it does is done, and call the action once more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._call()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._call()

    def _call(self) -> None:
        try:
            self._action()
            self._failing = False
        except (OSError, DiskError, MachineError) as error:
            if not self._failing:
                notify(f"{self._what} cannot be written: {error}")
            self._failing = True
