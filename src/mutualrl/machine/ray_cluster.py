"""A Ray cluster as a machine: how it is joined, whether its nodes have room for a pool, and its head node."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

from mutualrl.errors import MachineError
from mutualrl.machine.devices import Machine

CONNECT_SECONDS = 10.0
HEAD_SECONDS = 5.0  # between two looks at the head node
SLACK = 1e-6  # of fractions of a GPU
KINDS = ("CPU", "GPU")  # resources of Ray that processes are given

Resources = dict[str, float]  # by kind


def join_cluster(address: str) -> Machine:
    """Connect to a Ray cluster and return it as one machine: Ray decides which node has which GPU.

    Raises MachineError where Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray hides the GPUs from its own tasks
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
    """Return the CPUs and GPUs of each living node of the cluster that was joined."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [{kind: resources[kind] for kind in KINDS if resources.get(kind)} for resources in alive]


def machine_of(nodes: Sequence[Resources]) -> Machine:
    """Return nodes as one machine. Where they have GPUs, its cores are those beside a GPU of the node that has fewest,
    per GPU: a process takes its cores on the node of its GPU."""
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    beside = [node.get("CPU", 0) // node["GPU"] for node in nodes if node.get("GPU")]
    cores = min(beside) * gpus if beside else sum(node.get("CPU", 0) for node in nodes)
    return Machine(tuple(str(index) for index in range(gpus)), int(cores))


def require_room(processes: Sequence[Resources]) -> None:
    """Raise MachineError where the nodes of the cluster that was joined have no room for all processes: Ray would wait
    for it forever."""
    nodes = nodes_of_cluster()
    asked, there = _total(processes), _total(nodes)
    short = [
        f"{asked[kind]:g} {kind}s asked, {there[kind]:g} there" for kind in KINDS if asked[kind] > there[kind] + SLACK
    ]
    if short:
        raise MachineError(f"the Ray cluster is too small for the pool: {', '.join(short)} (nodes: {len(nodes)})")
    if (unplaced := without_room(processes, nodes)) is not None:
        each = "; ".join(map(_words, nodes))
        raise MachineError(
            f"no node of the Ray cluster has room for one more process of {_words(unplaced)}; {len(processes)} asked, "
            f"nodes: {each}; start the nodes with equal --num-cpus and --num-gpus"
        )


def without_room(processes: Sequence[Resources], nodes: Sequence[Resources]) -> Resources | None:
    """Return the first process that no node has room for, the largest placed first; None where all have a place."""
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
    return {kind: sum(each.get(kind, 0) for each in resources) for kind in KINDS}


def _words(resources: Resources) -> str:
    words = [f"{amount:g} {kind}{'' if amount == 1 else 's'}" for kind, amount in resources.items()]
    return ", ".join(words) or "nothing"


class HeadWatch:
    """Watch of the head node of the cluster that was joined.

    Ray waits a minute for one that does not answer, then ends this process and the tasks.
    """

    def __init__(self) -> None:
        import ray

        self._address, self.answers = ray.get_runtime_context().gcs_address, True
        self._next = time.monotonic()

    def news(self) -> str | None:
        """Return a sentence when the head node has stopped to answer, or answers again; None where nothing changed."""
        if time.monotonic() < self._next:
            return None
        answered = self.answers
        try:
            _connect(self._address, HEAD_SECONDS)
            self.answers = True
        except OSError:
            self.answers = False
        self._next = time.monotonic() + HEAD_SECONDS
        if answered == self.answers:
            return None
        if self.answers:
            return f"the head node of the Ray cluster ({self._address}) answers again"
        return (
            f"the head node of the Ray cluster ({self._address}) does not answer; unless it comes back, Ray ends this "
            "command and its policies in a minute; then resume the run with --resume, on a cluster that runs"
        )


def _connect(address: str, seconds: float) -> None:
    """Connect to HOST:PORT and close again."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _require_listener(address: str) -> None:
    """Raise MachineError where nothing listens at HOST:PORT: Ray itself would ask again for minutes."""
    named = (os.environ.get("RAY_ADDRESS") or _newest_cluster()) if address == "auto" else address
    listener = named.removeprefix("ray://")
    host, _, port = listener.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        _connect(listener, CONNECT_SECONDS)
    except (OSError, OverflowError, ValueError) as error:  # ValueError: what is no name of a host
        raise _no_cluster(address, f"{named}: {error}") from None


def _newest_cluster() -> str:
    """Return the cluster that Ray takes for `auto`: one that runs here, else the last one that was started, which may
    have ended."""
    from ray._private.services import canonicalize_bootstrap_address  # Ray says this nowhere else

    try:
        return canonicalize_bootstrap_address("auto") or ""
    except (ConnectionError, ValueError) as error:  # ValueError: what was written down is no address
        raise _no_cluster("auto", str(error).strip().partition("\n")[0]) from None


def _no_cluster(address: str, why: str) -> MachineError:
    return MachineError(
        f"--address {address}: no Ray cluster answers ({why}); start one with `ray start --head`, or name one with "
        "--address HOST:PORT"
    )
