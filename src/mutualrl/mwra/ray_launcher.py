"""Policies of a run on a Ray cluster, a placement group each: Ray places them, starts them again and keeps their logs.

The run's directory lies on a file system that all nodes share. Rounds, checkpoints and results are as on one machine,
and a policy that is started again resumes from its newest checkpoint.
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
from mutualrl.mwra.stop import StopSignals, ask_to_stop, stopped
from mutualrl.process.status import PolicyStatus, StatusWriter
from mutualrl.recipes import Recipe
from mutualrl.reporting.progress import Progress
from mutualrl.see.liveness import LOADING, NOT_STARTED, HeartbeatMonitor
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    import ray
    from ray.util.placement_group import PlacementGroup

POLL_SECONDS = 0.2
ROOM_SECONDS = 30.0  # without training: room on the cluster may be what a policy waits for
SILENT_SECONDS = 5.0  # without a heartbeat: Ray is about to start the policy again, or its own watch will end it


@dataclass(frozen=True, slots=True)
class _Started:
    """Policy that Ray runs: its name, the result of its task, and the placement group that it has."""

    name: str
    result: ray.ObjectRef[None]
    group: PlacementGroup


def run_on_cluster(
    run: RunDirectory, recipe: Recipe, placement: Placement, session: int, console: Console, request: StopSignals
) -> None:
    """Run the policies on the cluster that was joined; end all of them when the run fails or is stopped."""
    names = [policy.name for policy in recipe.policies]
    waiting = [name for name in names if not run.policy(name).result.exists()]
    running: list[_Started] = []
    status, head = _Status(run, session), HeadWatch()
    try:
        for name in waiting:
            run.policy(name).failure.unlink(missing_ok=True)  # of an earlier session
            running.append(_start(run, recipe, placement.allocation(name)))
        with Progress(run, names, recipe.run.steps, console, recipe.spec.metric("gate_rate")) as progress:
            deadline = None
            while running:
                if deadline is None and (request.received or run.stop_file.exists()):
                    deadline = time.monotonic() + recipe.run.round_timeout
                    ask_to_stop(run, console)
                if len(request.received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    break
                if (news := head.news()) is not None:
                    console.print(news, markup=False)
                _collect(run, recipe, running, status, console)
                status.update(policy.name for policy in running)
                if head.answers:
                    _watch_absent(recipe, running, status, console, stopping=deadline is not None)
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
    """Status of each policy for its peers: one without heartbeats while Ray runs it is being restarted."""

    def __init__(self, run: RunDirectory, session: int) -> None:
        self._writer = StatusWriter(run.root, session)
        self._heartbeats = HeartbeatMonitor(run.exchange)
        self._trained: dict[str, float] = {}
        self.without_room: set[str] = set()

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
            if not away and not phase.startswith(LOADING):
                self._trained[policy] = time.monotonic()
        self._writer.beat()

    def absent_for(self, policy: str) -> float:
        """Return the seconds since the policy was last seen past loading, or since the first call."""
        return time.monotonic() - self._trained.setdefault(policy, time.monotonic())

    def close(self, outcome: str) -> None:
        """Write how the run ended."""
        self._writer.close(outcome)


def bundles(placement: Placement) -> list[Resources]:
    """Return what each process of the pool takes of its node. Raises MachineError where ranks of one policy could be
    given the same GPU: Ray fills a GPU with parts before it takes the next."""
    for allocation in placement.allocations:
        if allocation.gpus and allocation.processes > 1 and _resources(allocation)["GPU"] < 1:
            raise MachineError(
                f"--launcher ray: policy {allocation.policy!r} shares its {allocation.processes} GPUs with others; "
                "expected whole GPUs, or one: --set launch.share_gpus=false"
            )
    return [_resources(allocation) for allocation in placement.allocations for _ in range(allocation.processes)]


def _resources(allocation: Allocation) -> Resources:
    """Return what a process of a policy takes of its node: its threads, and its GPU or its part of one."""
    resources = {"CPU": float(allocation.threads)}
    if allocation.gpus:
        resources["GPU"] = allocation.memory or 1.0 / allocation.policies_per_gpu
    return resources


def _start(run: RunDirectory, recipe: Recipe, allocation: Allocation) -> _Started:
    """Start a policy's task in a placement group with a bundle per rank. Ray moves the bundles of a lost node, and
    starts the task again at most `run.max_restarts` times; without limit where peers wait for it."""
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


def _collect(run: RunDirectory, recipe: Recipe, running: list[_Started], status: _Status, console: Console) -> None:
    """Take the policies that have ended out of `running`. Raises the error of one that failed."""
    import ray

    done, _ = ray.wait([policy.result for policy in running], timeout=POLL_SECONDS)
    for policy in [policy for policy in running if policy.result in done]:
        running.remove(policy)
        _end(policy, console)
        name, why = policy.name, "it ended without a result"
        try:
            ray.get(policy.result)
        except ray.exceptions.RayTaskError as error:
            why = str(error.cause)
        except ray.exceptions.RayError as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
        if run.policy(name).result.exists() or run.stop_file.exists():
            status.publish(name, "finished" if run.policy(name).result.exists() else "stopped")
            continue
        status.publish(name, "lost")
        failure = _failure(run, name, why)
        left = running or any(run.policy(other.name).result.exists() for other in recipe.policies)
        if recipe.run.on_peer_loss != "continue" or failure.kind != PeerLostError.kind or not left:
            raise failure
        console.print(
            f"{failure}\nIt is lost; the others continue without it (run.on_peer_loss: continue)", markup=False
        )


def _watch_absent(
    recipe: Recipe, running: list[_Started], status: _Status, console: Console, *, stopping: bool
) -> None:
    """Name the policies that the cluster has no room for, and end them where the run is asked to stop. Raises
    PeerLostError for a policy that does not come to train: Ray would wait for room, or restart it, for ever."""
    import ray

    for policy in list(running):
        absent = status.absent_for(policy.name)
        if absent < ROOM_SECONDS:
            status.without_room.discard(policy.name)
        if absent < (1.0 if stopping else ROOM_SECONDS):
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
        elif state != "CREATED" and policy.name not in status.without_room:
            status.without_room.add(policy.name)
            console.print(f"policy {policy.name!r} waits for room on the Ray cluster ({state})", markup=False)


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


def _end(policy: _Started, console: Console) -> None:
    """Remove a policy's placement group, which ends its tasks where they still run."""
    import ray

    # ray.cancel of a task that completes at this moment ends this process (ray-project/ray#54798)
    try:
        ray.util.remove_placement_group(policy.group)
    except ray.exceptions.RayError as error:  # the others are ended all the same
        console.print(f"the placement group of {policy.name!r} was not removed: {error}", markup=False)
