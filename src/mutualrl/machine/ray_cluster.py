"""Ray cluster as a machine: connecting to it, checking its nodes for room for a pool, watching its head node."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

from mutualrl.errors import MachineError
from mutualrl.machine.devices import Machine

CONNECT_SECONDS = 10.0
HEAD_SECONDS = 5.0  # between two polls of the head node
SLACK = 1e-6  # tolerance for fractional GPUs
KINDS = ("CPU", "GPU")  # Ray resources of the processes

Resources = dict[str, float]  # by kind


def join_cluster(address: str) -> Machine:
    """Connect to a Ray cluster and return it as one machine: Ray decides which node has which GPU.

    Raises MachineError if Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray hides the GPUs from its own tasks
    try:
        import ray
    except ImportError:
        raise MachineError("--launcher ray: Ray is not installed (pip install 'mutualrl[ray]')") from None
    _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _no_cluster(address, str(error).strip().partition("\n")[0]) from None
    return machine_of(nodes_of_cluster())


def nodes_of_cluster() -> list[Resources]:
    """Return the CPUs and GPUs of each live node of the joined cluster."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = []
    for resources in alive:
        nodes.append({kind: resources[kind] for kind in KINDS if resources.get(kind)})
    return nodes


def machine_of(nodes: Sequence[Resources]) -> Machine:
    """Return nodes as one machine. If they have GPUs, its cores per GPU are those of the node with the fewest: a
    process takes its cores on the node of its GPU."""
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    cores_per_gpu = [node.get("CPU", 0) // node["GPU"] for node in nodes if node.get("GPU")]
    cores = min(cores_per_gpu) * gpus if cores_per_gpu else sum(node.get("CPU", 0) for node in nodes)
    return Machine(tuple(str(index) for index in range(gpus)), int(cores))


def require_capacity(processes: Sequence[Resources]) -> None:
    """Raise MachineError if the nodes of the joined cluster have no room for all processes: Ray would wait forever."""
    nodes = nodes_of_cluster()
    requested, available = _total(processes), _total(nodes)
    shortages = [
        f"{requested[kind]:g} {kind}s requested, {available[kind]:g} available"
        for kind in KINDS
        if requested[kind] > available[kind] + SLACK
    ]
    if shortages:
        raise MachineError(f"the Ray cluster is too small for the pool: {', '.join(shortages)} (nodes: {len(nodes)})")
    if (unplaced := first_unplaceable(processes, nodes)) is not None:
        listed = "; ".join(map(_described, nodes))
        raise MachineError(
            f"no node of the Ray cluster has room for one more process of {_described(unplaced)}; "
            f"{len(processes)} requested, nodes: {listed}; start the nodes with equal --num-cpus and --num-gpus"
        )


def first_unplaceable(processes: Sequence[Resources], nodes: Sequence[Resources]) -> Resources | None:
    """Return the first process that fits on no node, placing the largest first; None if all fit."""
    free = [dict.fromkeys(KINDS, 0.0) | node for node in nodes]
    for process in sorted(processes, key=lambda needs: (needs.get("GPU", 0), needs["CPU"]), reverse=True):
        for node in free:
            if all(node[kind] + SLACK >= amount for kind, amount in process.items()):
                break
        else:
            return process
        for kind, amount in process.items():
            node[kind] -= amount
    return None


def _total(resources: Sequence[Resources]) -> Resources:
    return {kind: sum(entry.get(kind, 0) for entry in resources) for kind in KINDS}


def _described(resources: Resources) -> str:
    amounts = [f"{amount:g} {kind}{'' if amount == 1 else 's'}" for kind, amount in resources.items()]
    return ", ".join(amounts) or "nothing"


class HeadWatch:
    """Monitor of the joined cluster's head node.

    Ray waits a minute for a head node that does not answer, then ends this process and the tasks.
    """

    def __init__(self) -> None:
        import ray

        self._address, self.answers = ray.get_runtime_context().gcs_address, True
        self._next = time.monotonic()

    def news(self) -> str | None:
        """Return a message when the head node has stopped answering, or answers again; None if nothing changed."""
        if time.monotonic() < self._next:
            return None
        previous = self.answers
        try:
            _connect(self._address, HEAD_SECONDS)
            self.answers = True
        except OSError:
            self.answers = False
        self._next = time.monotonic() + HEAD_SECONDS
        if previous == self.answers:
            return None
        if self.answers:
            return f"the head node of the Ray cluster ({self._address}) answers again"
        return (
            f"the head node of the Ray cluster ({self._address}) does not answer; unless it recovers, Ray ends this "
            "command and its policies in a minute; then resume with --resume on a running cluster"
        )


def _connect(address: str, seconds: float) -> None:
    """Connect to HOST:PORT and close again."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _require_listener(address: str) -> None:
    """Raise MachineError if nothing listens at HOST:PORT: Ray itself would retry for minutes."""
    resolved = (os.environ.get("RAY_ADDRESS") or _newest_cluster()) if address == "auto" else address
    listener = resolved.removeprefix("ray://")
    host, _, port = listener.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        _connect(listener, CONNECT_SECONDS)
    except (OSError, OverflowError, ValueError) as error:  # ValueError: an invalid host name
        raise _no_cluster(address, f"{resolved}: {error}") from None


def _newest_cluster() -> str:
    """Return the address that Ray resolves `auto` to: a cluster that runs here, else the last one started, which may
    have ended."""
    from ray._private.services import canonicalize_bootstrap_address  # Ray has no public function for it

    try:
        return canonicalize_bootstrap_address("auto") or ""
    except (ConnectionError, ValueError) as error:  # ValueError: Ray's record is not an address
        raise _no_cluster("auto", str(error).strip().partition("\n")[0]) from None


def _no_cluster(address: str, reason: str) -> MachineError:
    return MachineError(
        f"--address {address}: no Ray cluster answers ({reason}); start one with `ray start --head`, or set "
        "--address HOST:PORT"
    )
