"""Stand in for a worker that the server beside this directory runs. Python imports this module at start if its
directory is on PYTHONPATH."""

from __future__ import annotations

import os
import sys

SERVER = "MUTUALRL_TEST_SERVER"  # path of its socket; unset: workers start as users start them
WORKER = ["-m", "mutualrl.training.worker"]


def inherited_files() -> list[int]:
    """Return the descriptors of the files that this process was started with."""
    inherited = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (pathlib is not imported yet)
        try:
            if os.get_inheritable(int(name)):
                inherited.append(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
    return inherited


def stand_in(path: str) -> None:
    """Have the server run this worker, forward signals to it, and end as it ends. Return if the server refuses."""
    import contextlib
    import json
    import resource
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    descriptors = inherited_files()
    umask = os.umask(0)
    os.umask(umask)
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    request = {
        "arguments": sys.orig_argv[3:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109
        "umask": umask,
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {limit: resource.getrlimit(limit) for limit in limits},
        "descriptors": descriptors,
    }
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "big")], descriptors)
    connection.sendall(data)
    with connection.makefile("r") as replies:
        first = replies.readline().strip()
        if first == "refused":
            return
        worker = int(first)

        def forward(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
        status = int(replies.readline().strip() or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if SERVER in os.environ and sys.orig_argv[1:3] == WORKER:
    stand_in(os.environ[SERVER])
