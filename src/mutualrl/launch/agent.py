"""Agent of one policy's process group: starts the ranks, ends all when one fails, and ends with its supervisor.

python -m mutualrl.launch.agent --run-dir DIR --policy NAME --attempt A --processes N --parent PID
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from mutualrl.process import loopback
from mutualrl.process.parent_watch import become_subreaper, end_children, watch_parent

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL for the ranks that remain when one has failed


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a policy's workers and wait for them. Exit with the code of the first that failed, 128 + signal if it was
    killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(arguments)
    watch_parent(args.parent)
    become_subreaper()
    for number in (signal.SIGINT, signal.SIGTERM):  # a batch system signals every process; the workers handle it
        signal.signal(number, signal.SIG_IGN)

    worker = [
        "mutualrl.training.worker",
        f"--run-dir={args.run_dir}",
        f"--policy={args.policy}",
        f"--attempt={args.attempt}",
        f"--parent={os.getpid()}",
    ]
    try:
        code = run_ranks(args.processes, [sys.executable, "-m", *worker])
    finally:
        end_children()  # processes that a worker started and left behind
    sys.exit(code if code >= 0 else 128 - code)


def run_ranks(count: int, command: list[str]) -> int:
    """Run a command once per rank, with the environment of torch.distributed.run. Return 0, or the exit code of the
    first rank that failed, negative for a signal; the others are then ended.

    The store, over which the ranks find each other, is a socket on the loopback that this process opens and rank 0
    inherits: no other run can take its port. torch.distributed.run is not used: its own store listens on all interfaces
    and unpickles what is put there.
    """
    with loopback.listen() as listener:
        ranks = []
        for rank in range(count):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": loopback.ADDRESS,
                "MASTER_PORT": str(listener.getsockname()[1]),
            }
            inherited = (listener.fileno(),) if rank == 0 else ()
            if rank == 0:
                variables[loopback.STORE_SOCKET] = str(listener.fileno())
            ranks.append(subprocess.Popen(command, env={**os.environ, **variables}, pass_fds=inherited))
    if (failed := _wait_for_first_failure(ranks)) is None:
        return 0
    _end([rank for rank in ranks if rank.poll() is None])
    return failed


def _wait_for_first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until a rank fails, and return its exit code, or until all have ended with 0, and return None."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := next((code for code in codes if code not in (None, 0)), None):
            return failed
        if all(code == 0 for code in codes):
            return None
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    main()
