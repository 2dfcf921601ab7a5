"""Agent of one policy's process group: torch.distributed.run, or the only worker, watching the supervisor above it.

python -m mutualrl.mwra.agent --run-dir DIR --policy NAME --attempt A --processes N --parent PID
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from mutualrl.process.parent_watch import adopt_orphans, end_children, watch_parent
from mutualrl.process.ports import free_port

LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers of a policy and wait for them. Ends with the exit code of the first that failed,
    128 + signal for one that was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    watch_parent(given.parent)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # a batch system signals every process; the workers know what to do
        signal.signal(number, signal.SIG_IGN)

    worker = [
        "mutualrl.training.worker",
        f"--run-dir={given.run_dir}",
        f"--policy={given.policy}",
        f"--attempt={given.attempt}",
        f"--parent={os.getpid()}",
    ]
    try:
        code = _run_one(worker) if given.processes == 1 else _run_group(given.processes, worker)
    finally:
        end_children()  # what a worker started and left
    sys.exit(code if code >= 0 else 128 - code)


def _run_one(worker: list[str]) -> int:
    """Run a group of one process, in the environment that torch.distributed.run gives it, without importing torch
    here. Returns its exit code, negative for a signal."""
    group_of_one = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
    }
    return subprocess.call([sys.executable, "-m", *worker], env={**os.environ, **group_of_one})


def _run_group(processes: int, worker: list[str]) -> int:
    """Run a group under torch.distributed.run; its processes meet on a port that the system chooses, so that two runs
    never collide. Returns 0, or the exit code of the first process that failed, negative for a signal."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(
            [
                "--standalone",
                f"--local-addr={LOOPBACK}",
                f"--nproc-per-node={processes}",
                "--max-restarts=0",
                "--signals-to-handle=SIGQUIT",
                "--module",
                *worker,
            ]
        )
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return int(error.get_first_failure()[1].exitcode)
    return 0


if __name__ == "__main__":
    main()
