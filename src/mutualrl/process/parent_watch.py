"""Every process of a run watches its parent, so that a supervisor killed with SIGKILL leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

import psutil

POLL_SECONDS = 0.5
#: environment variable with the process that a command of ours belongs to: when that one ends, the command is stopped
PARENT = "MUTUALRL_PARENT"
ORPHANED = 4  # exit code of a process whose parent is gone; nobody is there to read it


def adopt_orphans() -> None:
    """Make this process the parent of whatever its children leave behind (Linux; elsewhere nothing is done), so that an
    engine whose worker was killed is still below it, and ends with it."""
    if sys.platform == "linux":
        set_child_subreaper = 36  # prctl(2), PR_SET_CHILD_SUBREAPER
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


def end_children() -> None:
    """Kill everything below this process: an engine's own processes would outlive a worker that ends at once."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def watch_parent(expected: int) -> None:
    """End this process at once when its parent, `expected`, ends (or has ended before this was called).

    The chain is supervisor, agent, workers: each watches the one above it, so all are gone two polls after
    the supervisor.
    """

    def run() -> None:
        pause = threading.Event()
        while os.getppid() == expected:
            pause.wait(POLL_SECONDS)
        end_children()
        os._exit(ORPHANED)

    threading.Thread(target=run, name="parent-watch", daemon=True).start()


def stop_with_parent() -> None:
    """Stop this command as SIGTERM does when the process in PARENT ends; nothing where there is none."""
    expected = os.environ.pop(PARENT, "")
    if not expected.isdecimal():
        return

    def run() -> None:
        pause = threading.Event()
        while os.getppid() == int(expected):
            pause.wait(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=run, name="parent-watch", daemon=True).start()
