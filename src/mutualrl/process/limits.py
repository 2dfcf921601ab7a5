"""Limits for a piece of foreign code that runs in this process: time, CPU time, memory."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class CpuTimeError(Exception):
    """Code that computed for longer than it may."""


@contextmanager
def bounded(cpu_seconds: float, memory: int) -> Iterator[None]:
    """Raise CpuTimeError when the block computes for longer than `cpu_seconds` (CPU time of this process, so that a
    busy machine gives no other verdict), MemoryError when it takes more than `memory` bytes beside what is taken.

    Python code alone can be stopped so. Off the main thread, which signals do not reach, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise CpuTimeError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _address_space() + memory
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        if soft == resource.RLIM_INFINITY or soft > ceiling:
            resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Expired(BaseException):
    """Time is up. No `except Exception` of foreign code may take it for an error of its own."""


@contextmanager
def time_limit(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` when the block takes longer than `seconds`, also while it waits for a socket or a lock.

    Off the main thread, which signals do not reach, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except _Expired:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
