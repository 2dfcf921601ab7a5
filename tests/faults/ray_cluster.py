"""A Ray cluster of several raylets on this machine, in a separate process.

    python ray_cluster.py CPUS...     # one raylet per number of CPUs; the first is the head

Prints the address and the process ids of the head's raylet and GCS. Reads commands from stdin: `kill PID` kills the
raylet with that process id, like a machine that disappears; anything else shuts the cluster down.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RayCluster:
    """Client of the cluster that `python ray_cluster.py` runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address, head, control_store = self._answer().split()
        self.head, self.control_store = int(head), int(control_store)  # process ids of the head's raylet and GCS

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise AssertionError("the cluster process ended")

    def kill(self, raylet: int) -> None:
        """Kill the raylet with this process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"kill {raylet}\n")
        self._process.stdin.flush()
        assert self._answer() == "killed"


@contextmanager
def ray_cluster(*cpus: int, **environment: str) -> Iterator[RayCluster]:
    """Run a cluster during the block, with this environment for its workers."""
    command = [sys.executable, str(Path(__file__)), *map(str, cpus)]
    # Ray lowers the priority of its workers by default
    variables = {**os.environ, "RAY_worker_niceness": "0", **environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables) as process:
        try:
            yield RayCluster(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # ends the cluster and its raylets
            process.wait()


def main() -> None:
    """Start the raylets and execute the commands on stdin."""
    from ray.cluster_utils import Cluster

    cpus = [int(argument) for argument in sys.argv[1:]]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=count) for count in cpus[1:])]
    cluster.wait_for_nodes()
    by_raylet = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    control_store = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(f"answer {cluster.address} {next(iter(by_raylet))} {control_store}", flush=True)
    for line in sys.stdin:
        command, _, pid = line.strip().partition(" ")
        if command != "kill":
            break
        cluster.remove_node(by_raylet[int(pid)], allow_graceful=False)
        print("answer killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
