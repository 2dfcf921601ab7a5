"""Every process of a run watches its parent, so that a supervisor killed with SIGKILL leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import threading

import psutil

POLL_SECONDS = 0.5
ORPHANED = 4  # exit code of a process whose parent is gone; nobody is there to read it


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
