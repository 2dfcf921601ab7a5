"""Thread that repeats an action every few seconds in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mutualrl.console.lines import notify
from mutualrl.errors import DiskError, MachineError


class Repeater:
    """Thread that calls `action` at its start, every `interval` seconds, and at its end. If a disk or a store fails,
    one warning is printed, and later calls may succeed."""

    def __init__(self, what: str, action: Callable[[], object], interval: float) -> None:
        self._what = what
        self._action = action
        self._interval = interval
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)

    def start(self) -> None:
        """Call the action and start the thread; a no-op once it has started."""
        if self._thread.ident is None:
            self._call()
            self._thread.start()

    def stop(self) -> None:
        """End the thread after any call in progress, and call the action once more."""
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
