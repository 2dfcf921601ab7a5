"""Every process of a run watches its parent, so that a supervisor killed with SIGKILL leaves nothing behind."""

from __future__ import annotations

import os
import threading

POLL_SECONDS = 0.5
ORPHANED = 4  # exit code of a process whose parent is gone; nobody is there to read it


def watch_parent(expected: int) -> None:
    """End this process at once when its parent, `expected`, ends (or has ended before this was called).

    The chain is supervisor, agent, workers: each watches the one above it, so all are gone two polls after
    the supervisor.
    """

    def run() -> None:
        pause = threading.Event()
        while os.getppid() == expected:
            pause.wait(POLL_SECONDS)
        os._exit(ORPHANED)

    threading.Thread(target=run, name="parent-watch", daemon=True).start()
