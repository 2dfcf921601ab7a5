"""A Ray cluster of several raylets on this machine, in a process of its own.

    python ray_cluster.py CPUS...     # a raylet with so many CPUs each, the first is the head

Prints the address and the process ids of the head's raylet and GCS. Reads from stdin: `kill PID` kills the raylet of that process
id as a machine that goes away, anything else ends it all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RayCluster:
    """Cluster that `python ray_cluster.py` keeps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address, head, control_store = self._answer().split()
        self.head, self.control_store = int(head), int(control_store)  # process ids of the head's raylet and GCS

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise AssertionError("the cluster has ended")

    def kill(self, raylet: int) -> None:
        """Kill the raylet of a process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"kill {raylet}\n")
        self._process.stdin.flush()
        assert self._answer() == "killed"


@contextmanager
def ray_cluster(*cpus: int, **environment: str) -> Iterator[RayCluster]:
    """Keep a cluster for as long as the block lasts; its workers have the environment."""
    command = [sys.executable, str(Path(__file__)), *map(str, cpus)]
    # Ray gives its workers a low priority, for machines that are a cluster's alone
    variables = {**os.environ, "RAY_worker_niceness": "0", **environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables) as process:
        try:
            yield RayCluster(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # which ends it, and its raylets
            process.wait()


def main() -> None:
    """Start the raylets and do what stdin says."""
    from ray.cluster_utils import Cluster

    cpus = [int(each) for each in sys.argv[1:]]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], "include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=each) for each in cpus[1:])]
    cluster.wait_for_nodes()
    by_raylet = {node.all_processes["raylet"][0].process.pid: node for node in nodes}
    control_store = cluster.head_node.all_processes["gcs_server"][0].process.pid
    print(f"answer {cluster.address} {next(iter(by_raylet))} {control_store}", flush=True)
    for line in sys.stdin:
        verb, _, number = line.strip().partition(" ")
        if verb != "kill":
            break
        cluster.remove_node(by_raylet[int(number)], allow_graceful=False)
        print("answer killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
