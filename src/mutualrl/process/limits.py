"""Limits on third-party code that runs in this process: wall-clock time, CPU time, memory."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mutualrl.console.lines import notify
from mutualrl.errors import MutualRLError
from mutualrl.process.user_code import PassingError, exit_now

REWARD_SECONDS = 1800.0  # limit of one call of a reward function, unless an option or `run.step_timeout` says otherwise


class CpuTimeError(Exception):
    """Code that exceeded its CPU time."""


@contextmanager
def bounded(cpu_seconds: float, memory: int) -> Iterator[None]:
    """Raise CpuTimeError when the block uses more than `cpu_seconds` (CPU time of this process, so that a busy machine
    does not change the verdict), MemoryError when it allocates more than `memory` bytes beyond those in use.

    Only Python code can be stopped this way. Off the main thread, which receives no signals, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise CpuTimeError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    requested = _address_space() + memory
    ceiling = requested if hard == resource.RLIM_INFINITY else min(requested, hard)
    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        if soft == resource.RLIM_INFINITY or soft > ceiling:
            resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _ExpiredError(PassingError):
    """Time-out; a BaseException, so that no `except Exception` in the block catches it."""


def _exit(error: MutualRLError) -> NoReturn:
    notify(error)
    exit_now(error.exit_code)


#: ends this process with an error that user code does not let through; a command sets one that prints it as its own
end_process: list[Callable[[MutualRLError], NoReturn]] = [_exit]
ATTEMPTS = 5  # exceptions raised in a block that exceeds its time limit, before the process is ended
REPEAT_SECONDS = 1.0


@contextmanager
def time_limit(seconds: float, error: MutualRLError) -> Iterator[None]:
    """Raise `error` when the block takes longer than `seconds`, even while it waits for a socket or a lock. A block
    that catches everything is interrupted again every second; after `ATTEMPTS` of these the process ends with the
    error.

    Off the main thread, which receives no signals, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    attempts = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > ATTEMPTS:
            end_process[-1](error)
        raise _ExpiredError

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_SECONDS)
        yield
    except _ExpiredError:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
