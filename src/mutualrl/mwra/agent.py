"""Agent of one policy's process group: torch.distributed.run, watching the supervisor above it.

python -m mutualrl.mwra.agent --run-dir DIR --policy NAME --attempt A --processes N --parent PID
    [--nodes N --node-rank R --rendezvous HOST:PORT]      (a group over several nodes: N agents, one each)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from mutualrl.process.parent_watch import adopt_orphans, end_children, watch_parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers of a policy and wait for them. Ends with the exit code of the first that failed,
    128 + signal for one that was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    watch_parent(given.parent)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # a batch system signals every process; the workers know what to do
        signal.signal(number, signal.SIG_IGN)

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(
            [
                *_meeting(given),
                f"--nproc-per-node={given.processes}",
                "--max-restarts=0",
                "--signals-to-handle=SIGQUIT",
                "--module",
                "mutualrl.training.worker",
                f"--run-dir={given.run_dir}",
                f"--policy={given.policy}",
                f"--attempt={given.attempt}",
                f"--parent={os.getpid()}",
            ]
        )
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        code = error.get_first_failure()[1].exitcode
        sys.exit(code if code > 0 else 128 - code)
    finally:
        end_children()  # what a worker started and left


def _meeting(given: argparse.Namespace) -> list[str]:
    """Return how the group's processes find each other: on one node on a port that the system chooses, so that two
    runs never collide; over several nodes where the policy's first node said."""
    if given.nodes == 1:
        return ["--standalone", "--local-addr=127.0.0.1"]
    host, _, port = given.rendezvous.rpartition(":")
    return [
        f"--nnodes={given.nodes}",
        f"--node-rank={given.node_rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]


if __name__ == "__main__":
    main()
