"""Every process of a run watches its parent, so that a supervisor killed with SIGKILL leaves no processes behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

import psutil

from mutualrl.process.user_code import exit_now

POLL_SECONDS = 0.5
#: environment variable with the pid of a command's parent: when that process ends, the command is stopped
PARENT = "MUTUALRL_PARENT"
ORPHANED = 4  # exit code of a process whose parent has ended; no process reads it


def become_subreaper() -> None:
    """Make this process the subreaper of its descendants (Linux only; a no-op elsewhere), so that an engine whose
    worker was killed becomes its child and ends with it."""
    if sys.platform == "linux":
        set_child_subreaper = 36  # prctl(2), PR_SET_CHILD_SUBREAPER
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


def end_children() -> None:
    """Kill all descendants of this process: an engine's processes would outlive a worker that exits immediately."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def watch_parent(expected: int) -> None:
    """End this process immediately when its parent, `expected`, ends (or has already ended).

    The chain is supervisor, agent, workers: each watches the one above it, so all have ended two polls after the
    supervisor.
    """

    def run() -> None:
        pause = threading.Event()
        while os.getppid() == expected:
            pause.wait(POLL_SECONDS)
        end_children()
        exit_now(ORPHANED)

    threading.Thread(target=run, name="parent-watch", daemon=True).start()


def stop_with_parent() -> None:
    """End this command when the process in PARENT ends: SIGTERM, and again for a run that would first save a
    checkpoint. A no-op if PARENT is not set."""
    expected = os.environ.pop(PARENT, "")
    if not expected.isdecimal():
        return

    def run() -> None:
        pause = threading.Event()
        while os.getppid() == int(expected):
            pause.wait(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        pause.wait(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=run, name="parent-watch", daemon=True).start()
