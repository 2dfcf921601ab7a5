"""Policies of a run on a Ray cluster, one placement group each: Ray places and restarts them and keeps their logs.

The run directory is on a file system that all nodes share. Rounds, checkpoints and results are as on one machine, and
a restarted policy resumes from its newest checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from mutualrl.errors import MachineError, MutualRLError, PeerLostError, RunInterruptedError, exit_code_of
from mutualrl.machine.ray_cluster import HeadWatch, Resources
from mutualrl.mwra.group import CONSEQUENCES, failure_of
from mutualrl.mwra.placement import Allocation, Placement
from mutualrl.mwra.ray_worker import PolicyDiedError, PolicyTask, in_bundle, train_policy
from mutualrl.mwra.session import Launch
from mutualrl.mwra.stop import StopSignals, request_stop, stopped
from mutualrl.process.status import PolicyStatus, StatusWriter
from mutualrl.recipes import Recipe
from mutualrl.reporting.progress import Progress
from mutualrl.see.liveness import LOADING, NOT_STARTED, HeartbeatMonitor
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    import ray
    from ray.util.placement_group import PlacementGroup

POLL_SECONDS = 0.2
RESOURCE_WAIT_SECONDS = 30.0  # without training, before the policy's placement group is checked
SILENT_SECONDS = 5.0  # without a heartbeat: Ray is restarting the policy, or its watch is about to end it


@dataclass(frozen=True, slots=True)
class _Started:
    """Policy that Ray runs: its name, its task's result and its placement group."""

    name: str
    result: ray.ObjectRef[None]
    group: PlacementGroup


def run_on_cluster(
    run: RunDirectory, recipe: Recipe, placement: Placement, session: int, console: Console, request: StopSignals
) -> None:
    """Run the policies on the connected cluster; end all of them if the run fails or is stopped."""
    names = [policy.name for policy in recipe.policies]
    unfinished = [name for name in names if not run.policy(name).result.exists()]
    running: list[_Started] = []
    status, head = _Status(run, session), HeadWatch()
    try:
        for name in unfinished:
            run.policy(name).failure.unlink(missing_ok=True)  # from an earlier session
            running.append(_start(run, recipe, placement.allocation(name)))
        limit = recipe.task.max_prompt_tokens
        with Progress(run, names, recipe.run.steps, console, recipe.regime_class.metrics, limit) as progress:
            deadline = None
            while running:
                if deadline is None and (request.received or run.stop_file.exists()):
                    deadline = time.monotonic() + recipe.run.round_timeout
                    request_stop(run, console)
                if len(request.received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    break
                if (news := head.news()) is not None:
                    console.print(news, markup=False)
                _reap(run, recipe, running, status, console)
                status.update(policy.name for policy in running)
                if head.answers:
                    _check_absent(recipe, running, status, console, stopping=deadline is not None)
                progress.update()
        if request.received or run.stop_file.exists():
            raise RunInterruptedError(stopped(run, recipe, Launch(), request))
        status.close("finished")
    except MutualRLError as error:
        status.close(f"{error.kind}: {error}")
        raise
    finally:
        for policy in running:
            _end(policy, console)


class _Status:
    """Status of each policy for its peers: without heartbeats while Ray runs it, it is being restarted."""

    def __init__(self, run: RunDirectory, session: int) -> None:
        self._writer = StatusWriter(run.root, session)
        self._heartbeats = HeartbeatMonitor(run.exchange)
        self._trained: dict[str, float] = {}
        self.waiting_for_resources: set[str] = set()

    def publish(self, policy: str, state: str) -> None:
        """Publish a policy's state if it has changed."""
        if self._writer.statuses.get(policy) != PolicyStatus(state):
            self._writer.publish(policy, PolicyStatus(state))

    def update(self, policies: Iterable[str]) -> None:
        """Publish whether the policies that Ray runs send heartbeats."""
        for policy in policies:
            silent, phase = self._heartbeats.seconds_since(policy)
            absent = silent > SILENT_SECONDS or phase.startswith(NOT_STARTED)
            self.publish(policy, "restarting" if absent else "running")
            if not absent and not phase.startswith(LOADING):
                self._trained[policy] = time.monotonic()
        self._writer.beat()

    def absent_for(self, policy: str) -> float:
        """Return the seconds since the policy was last seen after loading, or since the first call."""
        return time.monotonic() - self._trained.setdefault(policy, time.monotonic())

    def close(self, outcome: str) -> None:
        """Write the outcome of the run."""
        self._writer.close(outcome)


def bundles(placement: Placement) -> list[Resources]:
    """Return the resources of each process of the pool. Raises MachineError if ranks of one policy could share a GPU:
    Ray packs fractions onto one GPU before it uses the next."""
    for allocation in placement.allocations:
        if allocation.gpus and allocation.processes > 1 and _resources(allocation)["GPU"] < 1:
            raise MachineError(
                f"--launcher ray: policy {allocation.policy!r} shares its {allocation.processes} GPUs with others; "
                "expected whole GPUs, or one: --set launch.share_gpus=false"
            )
    return [_resources(allocation) for allocation in placement.allocations for _ in range(allocation.processes)]


def _resources(allocation: Allocation) -> Resources:
    """Return the resources of one process of a policy: its threads, and its GPU or fraction of one."""
    resources = {"CPU": float(allocation.threads)}
    if allocation.gpus:
        resources["GPU"] = allocation.memory or 1.0 / allocation.policies_per_gpu
    return resources


def _start(run: RunDirectory, recipe: Recipe, allocation: Allocation) -> _Started:
    """Start a policy's task in a placement group with one bundle per rank. Ray moves the bundles of a lost node and
    restarts the task at most `run.max_restarts` times, without limit if peers wait for it."""
    import ray

    resources = _resources(allocation)
    group = ray.util.placement_group([resources] * allocation.processes, name=allocation.policy, strategy="PACK")
    train = in_bundle(
        train_policy,
        group,
        0,
        resources,
        name=f"mutualrl {allocation.policy}",
        max_retries=-1 if recipe.run.on_peer_loss == "wait" else recipe.run.max_restarts,
        retry_exceptions=[PolicyDiedError],
    )
    task = PolicyTask(run, allocation.policy, allocation.threads, ray.util.get_node_ip_address())
    return _Started(allocation.policy, train.remote(task, group, resources), group)


def _reap(run: RunDirectory, recipe: Recipe, running: list[_Started], status: _Status, console: Console) -> None:
    """Remove ended policies from `running` and publish their states. Raises the error of a failed one."""
    import ray

    done, _ = ray.wait([policy.result for policy in running], timeout=POLL_SECONDS)
    for policy in [policy for policy in running if policy.result in done]:
        running.remove(policy)
        _end(policy, console)
        name, reason = policy.name, "it ended without a result"
        try:
            ray.get(policy.result)
        except ray.exceptions.RayTaskError as error:
            reason = str(error.cause)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if run.policy(name).result.exists() or run.stop_file.exists():
            status.publish(name, "finished" if run.policy(name).result.exists() else "stopped")
            continue
        status.publish(name, "lost")
        failure = _failure(run, name, reason)
        others = running or any(run.policy(other.name).result.exists() for other in recipe.policies)
        if recipe.run.on_peer_loss != "continue" or failure.kind != PeerLostError.kind or not others:
            raise failure
        console.print(
            f"{failure}\nIt is lost; the others continue without it (run.on_peer_loss: continue)", markup=False
        )


def _check_absent(
    recipe: Recipe, running: list[_Started], status: _Status, console: Console, *, stopping: bool
) -> None:
    """Report policies that wait for resources of the cluster, and end them if a stop was requested. Raises
    PeerLostError for a policy that does not train: Ray would wait for resources, or restart it, without limit."""
    import ray

    for policy in list(running):
        absent = status.absent_for(policy.name)
        if absent < RESOURCE_WAIT_SECONDS:
            status.waiting_for_resources.discard(policy.name)
        if absent < (1.0 if stopping else RESOURCE_WAIT_SECONDS):
            continue
        state = ray.util.placement_group_table(policy.group)["state"]
        if state != "CREATED" and stopping:
            running.remove(policy)
            _end(policy, console)
            status.publish(policy.name, "stopped")
        elif absent > recipe.run.round_timeout:
            raise PeerLostError(
                f"policy {policy.name!r} has not trained for {absent:.0f} s (run.round_timeout); its placement group "
                f"is {state}; --resume resumes the run"
            )
        elif state != "CREATED" and policy.name not in status.waiting_for_resources:
            status.waiting_for_resources.add(policy.name)
            console.print(f"policy {policy.name!r} waits for resources on the Ray cluster ({state})", markup=False)


def _failure(run: RunDirectory, policy: str, reason: str) -> MutualRLError:
    """Return a policy's last error: its own, or else that it has used all its restarts."""
    failure = failure_of(run, policy)
    logs = "its log is in Ray's session directory on its node, and in the dashboard"
    if failure is None or failure[0] in ("died", *CONSEQUENCES):
        cause = reason if failure is None else failure[1]
        return PeerLostError(f"policy {policy!r} died, with no restart left (run.max_restarts): {cause}; {logs}")
    kind, message = failure
    error = MutualRLError(f"policy {policy!r} failed: {message}; {logs}")
    error.kind, error.exit_code = kind, exit_code_of(kind) or MutualRLError.exit_code
    return error


def _end(policy: _Started, console: Console) -> None:
    """Remove a policy's placement group, which ends its running tasks."""
    import ray

    # ray.cancel of a task that completes at this moment ends this process (ray-project/ray#54798)
    try:
        ray.util.remove_placement_group(policy.group)
    except ray.exceptions.RayError as error:  # still end the others
        console.print(f"the placement group of {policy.name!r} was not removed: {error}", markup=False)
