"""Policies of a run on a Ray cluster, one Ray Train run each: Ray places them, starts them again and keeps their logs.

The run's directory lies on a file system that all nodes share, as Ray Train's own storage does. Rounds, checkpoints and
results are as on one machine, and a policy that is started again resumes from its newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mutualrl.errors import MachineError, MutualRLError, PeerLostError, RunInterruptedError, exit_code_of
from mutualrl.machine.devices import Machine
from mutualrl.mwra.group import CONSEQUENCES, failure_of
from mutualrl.mwra.placement import Allocation, Placement
from mutualrl.mwra.session import Launch
from mutualrl.mwra.stop import StopSignals, ask_to_stop, stopped
from mutualrl.process.status import PolicyStatus, StatusWriter
from mutualrl.recipes import Recipe
from mutualrl.reporting.progress import Progress
from mutualrl.see.liveness import NOT_STARTED, HeartbeatMonitor
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    import ray

CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.2
SILENT_SECONDS = 5.0  # without a heartbeat: Ray is about to start the policy again, or its own watch will end it


def join_cluster(address: str) -> Machine:
    """Connect to a Ray cluster and return its GPUs and cores as those of one machine: Ray decides which node has which.

    Raises MachineError where Ray is not installed, or no cluster answers.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
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
    there = ray.cluster_resources()
    return Machine(tuple(str(index) for index in range(int(there.get("GPU", 0)))), int(there.get("CPU", 0)))


def _require_listener(address: str) -> None:
    """Raise MachineError where nothing listens at HOST:PORT: Ray itself would ask again for minutes."""
    named = (os.environ.get("RAY_ADDRESS") or _newest_cluster()) if address == "auto" else address
    host, _, port = named.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
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


def run_on_cluster(
    run: RunDirectory, recipe: Recipe, placement: Placement, session: int, console: Console, request: StopSignals
) -> None:
    """Run the policies on the cluster that was joined; end all of them when the run fails
    or is stopped."""
    names = [policy.name for policy in recipe.policies]
    waiting = {name for name in names if not run.policy(name).result.exists()}
    fits = {_start(run, recipe, placement.allocation(name)): name for name in names if name in waiting}
    status = _Status(run, session)
    try:
        with Progress(run, names, recipe.run.steps, console, recipe.spec.metric("gate_rate")) as progress:
            deadline = None
            while fits:
                if deadline is None and (request.received or run.stop_file.exists()):
                    deadline = time.monotonic() + recipe.run.round_timeout
                    ask_to_stop(run, console)
                if len(request.received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    break
                _collect(run, recipe, fits, status, console)
                status.update(fits.values())
                progress.update()
        if request.received or run.stop_file.exists():
            raise RunInterruptedError(stopped(run, recipe, Launch(), request))
        status.close("finished")
    except MutualRLError as error:
        status.close(f"{error.kind}: {error}")
        raise
    finally:
        _end(fits)


class _Status:
    """Status of each policy for its peers: one without heartbeats while Ray runs it is being restarted."""

    def __init__(self, run: RunDirectory, session: int) -> None:
        self._writer = StatusWriter(run.root, session)
        self._heartbeats = HeartbeatMonitor(run.exchange)

    def publish(self, policy: str, state: str) -> None:
        """Publish a policy's state if it changed."""
        if self._writer.statuses.get(policy) != PolicyStatus(state):
            self._writer.publish(policy, PolicyStatus(state))

    def update(self, policies: Iterable[str]) -> None:
        """Publish whether the policies that Ray runs send heartbeats."""
        for policy in policies:
            silent, phase = self._heartbeats.seconds_since(policy)
            away = silent > SILENT_SECONDS or phase.startswith(NOT_STARTED)
            self.publish(policy, "restarting" if away else "running")
        self._writer.beat()

    def close(self, outcome: str) -> None:
        """Write how the run ended."""
        self._writer.close(outcome)


def require_room(placement: Placement) -> None:
    """Raise MachineError where the cluster has less than the policies are given: Ray would wait forever for more."""
    import ray

    asked: dict[str, float] = {}
    for allocation in placement.allocations:
        for kind, amount in _resources(allocation).items():
            asked[kind] = asked.get(kind, 0.0) + amount * allocation.processes
    there = ray.cluster_resources()
    short = {kind: amount for kind, amount in asked.items() if there.get(kind, 0.0) < amount - 1e-6}
    if short:
        words = ", ".join(f"{amount:g} {kind}s asked, {there.get(kind, 0.0):g} there" for kind, amount in short.items())
        raise MachineError(
            f"the Ray cluster is too small for the pool: {words} (nodes: {sum(n['Alive'] for n in ray.nodes())})"
        )


def _resources(allocation: Allocation) -> dict[str, float]:
    """Return what a process of a policy takes of its node: its threads, and its GPU or its part of one."""
    resources = {"CPU": float(allocation.threads)}
    if allocation.gpus:
        resources["GPU"] = allocation.memory or 1.0 / allocation.policies_per_gpu
    return resources


def _start(run: RunDirectory, recipe: Recipe, allocation: Allocation) -> ray.ObjectRef[None]:
    """Start a policy's Ray Train run, from a task on this node: Ray Train takes signals, and waits."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    patient = recipe.run.on_peer_loss == "wait"
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=here)(_fit)
    reference: ray.ObjectRef[None] = task.options(name=f"mutualrl {allocation.policy}").remote(
        {
            "run_dir": str(run.root),
            "policy": allocation.policy,
            "threads": allocation.threads,
            "host": ray.util.get_node_ip_address(),
        },
        allocation.processes,
        _resources(allocation),
        -1 if patient else recipe.run.max_restarts,
    )
    return reference


def _fit(config: dict[str, Any], workers: int, resources: dict[str, float], restarts: int) -> None:
    """Run a policy as a Ray Train run of its own; `restarts` of it at most, -1 for no limit."""
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    from pathlib import Path

    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from mutualrl.mwra.ray_worker import train_policy

    DataParallelTrainer(
        train_policy,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, use_gpu="GPU" in resources, resources_per_worker=resources, placement_strategy="PACK"
        ),
        run_config=ray.train.RunConfig(
            name=str(config["policy"]),
            storage_path=str(Path(config["run_dir"]) / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=restarts),
        ),
    ).fit()


def _collect(
    run: RunDirectory, recipe: Recipe, fits: dict[ray.ObjectRef[None], str], status: _Status, console: Console
) -> None:
    """Take the policies that have ended out of `fits`. Raises the error of one that failed."""
    import ray

    done, _ = ray.wait(list(fits), timeout=POLL_SECONDS)
    for reference in done:
        name, why = fits.pop(reference), ""
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
        if run.policy(name).result.exists() or run.stop_file.exists():
            status.publish(name, "finished" if run.policy(name).result.exists() else "stopped")
            continue
        status.publish(name, "lost")
        failure = _failure(run, name, why)
        if recipe.run.on_peer_loss != "continue" or failure.kind != PeerLostError.kind or not fits:
            raise failure
        console.print(
            f"{failure}\nIt is lost; the others continue without it (run.on_peer_loss: continue)", markup=False
        )


def _failure(run: RunDirectory, policy: str, why: str) -> MutualRLError:
    """Return a policy's last error: the one that it wrote, else that it used up its restarts."""
    left = failure_of(run, policy)
    where = "its log is in the session's directory of Ray on its node, and in the dashboard"
    if left is None or left[0] in ("died", *CONSEQUENCES):
        words = why if left is None else left[1]
        return PeerLostError(f"policy {policy!r} died, with no restart left (run.max_restarts): {words}; {where}")
    kind, message = left
    error = MutualRLError(f"policy {policy!r} failed: {message}; {where}")
    error.kind, error.exit_code = kind, exit_code_of(kind) or MutualRLError.exit_code
    return error


def _end(fits: dict[ray.ObjectRef[None], str]) -> None:
    """End what still runs. A task that ends takes its Ray Train run with it, and each worker its process."""
    import ray

    for reference in fits:
        ray.cancel(reference, force=True)
