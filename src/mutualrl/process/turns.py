"""Mutual exclusion of processes: one runs a block, the others wait until it leaves the block or ends."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.2


@contextmanager
def turn(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a file lock for the duration of the block; wait for it while another process holds it (the system releases
    it when that process ends). `on_wait` is called once if the lock is not free."""
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
