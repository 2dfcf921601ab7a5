"""Agent of one policy's process group: runs torch.distributed.run or a single worker, and ends with its supervisor.

python -m mutualrl.mwra.agent --run-dir DIR --policy NAME --attempt A --processes N --parent PID
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from mutualrl.process.parent_watch import become_subreaper, end_children, watch_parent
from mutualrl.process.ports import free_port

LOOPBACK = "127.0.0.1"


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
        code = _run_one(worker) if args.processes == 1 else _run_group(args.processes, worker)
    finally:
        end_children()  # processes that a worker started and left behind
    sys.exit(code if code >= 0 else 128 - code)


def _run_one(worker: list[str]) -> int:
    """Run a group of one process with the environment of torch.distributed.run, without importing torch here. Return
    its exit code, negative for a signal."""
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port(LOOPBACK)),
    }
    return subprocess.call([sys.executable, "-m", *worker], env={**os.environ, **variables})


def _run_group(processes: int, worker: list[str]) -> int:
    """Run a group under torch.distributed.run, with a rendezvous port chosen by the system, so that runs never collide.
    Return 0, or the exit code of the first process that failed, negative for a signal."""
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
