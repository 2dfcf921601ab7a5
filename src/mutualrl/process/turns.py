"""Taking turns: one process at a time does something, the others wait until it has done it or is gone."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.2


@contextmanager
def turn(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file for as long as the block lasts; wait for it as long as another process holds it, which
    the system ends with that process. `on_wait` is called once when it has to wait."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a", encoding="utf-8") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    on_wait()
                waiting = True
                time.sleep(POLL_SECONDS)
        yield  # closing the file releases the lock
