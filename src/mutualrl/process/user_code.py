"""Containment of user code that runs in this process: what it prints, and how it leaves."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class PassingError(BaseException):
    """Base of what this package raises through user code, which must not be taken for an error of it."""


class ExitError(BaseException):
    """User code that called `os._exit`; a BaseException, as SystemExit is."""


#: what user code may raise that ends neither this process nor a block that catches `Exception`; a KeyboardInterrupt
#: only if `interrupted()` is False
LEAVING = (SystemExit, GeneratorExit, ExitError, KeyboardInterrupt)

_lock = threading.Lock()
_blocks = 0  # asynchronous functions overlap: the first block changes the process, the last restores it
_stdout = sys.stdout
_interrupted = False  # by a signal
#: ends this process also while user code runs
exit_now = os._exit


@contextmanager
def contained() -> Iterator[None]:
    """Run user code: what it prints goes to stderr, and `os._exit` raises ExitError in this process; its
    forked children may exit."""
    with _signalled_interrupts():
        yield from _without_stdout()


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Run user code: a child that it forks ends where it leaves the block, since it would go on as a second trainer."""
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != owner:
            sys.stderr.write(f"mutualrl: a process that {what} forked returned from it, and ends here\n")
            exit_now(0)


@contextmanager
def own_state() -> Iterator[None]:
    """Run user code with random states of its own, and put back what it may change: the random states of Python, NumPy
    and torch, torch's default dtype and whether gradients are on. Its random states follow from ours, so that a resumed
    run gives it the same ones."""
    restore, digest = _saved_state()
    seed = int.from_bytes(digest[:4])
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)
    try:
        with alone("a reward function"):
            yield
    finally:
        restore()


def _saved_state() -> tuple[Callable[[], None], bytes]:
    """Return a function that puts the present state back, and a digest of the random states."""
    python, digest = random.getstate(), hashlib.sha256(repr(random.getstate()).encode())
    restorers: list[Callable[[], object]] = [lambda: random.setstate(python)]
    if (numpy := sys.modules.get("numpy")) is not None:
        drawn = numpy.random.get_state()
        digest.update(repr(drawn[1:]).encode())
        restorers.append(lambda: numpy.random.set_state(drawn))
    if (torch := sys.modules.get("torch")) is not None:
        state, kind, gradients = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
        digest.update(state.numpy().tobytes())
        restorers += [
            lambda: torch.set_rng_state(state),
            lambda: torch.set_default_dtype(kind),
            lambda: torch.set_grad_enabled(gradients),
        ]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices = torch.cuda.get_rng_state_all()
            restorers.append(lambda: torch.cuda.set_rng_state_all(devices))

    def restore() -> None:
        for each in restorers:
            each()

    return restore, digest.digest()


def _without_stdout() -> Iterator[None]:
    global _blocks, _stdout  # noqa: PLW0603  (they belong to the process, as what they replace)
    with _lock:
        if _blocks == 0:
            _stdout, sys.stdout = sys.stdout, sys.stderr
            os._exit = _refuser(os.getpid())  # type: ignore[assignment]  # mypy: a function has a name
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                sys.stdout = _stdout
                os._exit = exit_now


def interrupted() -> bool:
    """Return whether a KeyboardInterrupt in the current block came from SIGINT, and not from the user's code."""
    return _interrupted


@contextmanager
def _signalled_interrupts() -> Iterator[None]:
    """Record SIGINT where Python's own handler would raise KeyboardInterrupt for it."""
    global _interrupted  # noqa: PLW0603  (of the process, as signals are)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def record(number: int, frame: FrameType | None) -> NoReturn:
        global _interrupted  # noqa: PLW0603
        _interrupted = True
        raise KeyboardInterrupt

    _interrupted = False
    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _refuser(owner: int) -> Callable[[int], NoReturn]:
    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            exit_now(status)
        raise ExitError(f"called os._exit({status})")

    return refuse


def describe(error: BaseException) -> str:
    """Return what user code raised, as text: an exception, or the way in which it tried to end the process."""
    if isinstance(error, KeyboardInterrupt):
        return "raised KeyboardInterrupt"
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)})"
    return str(error) if isinstance(error, ExitError) else f"{type(error).__name__}: {error}"
