"""Policies of a run on a Ray cluster, one placement group each: Ray places them and keeps their logs.

The run directory is on a file system that all nodes share. Rounds, checkpoints and results are as on one machine. An
attempt of a policy is a task; when it dies, `launch.life` decides on the next one, which resumes from the newest
checkpoint. Ray moves the bundles of a lost node.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from mutualrl.errors import MachineError, MutualRLError, PeerLostError, RewardError, RunInterruptedError
from mutualrl.launch.death import failure_of, own_error
from mutualrl.launch.launcher import Launcher, ManagedPolicy
from mutualrl.launch.life import Die, Event, Finish, Tick
from mutualrl.launch.ray_worker import PolicyDiedError, PolicyTask, answer_source, in_bundle, train_policy
from mutualrl.launch.session import Launch
from mutualrl.launch.stop import request_stop, stopped
from mutualrl.machine.ray_cluster import HeadWatch, Resources
from mutualrl.mwra.placement import Placement
from mutualrl.process.status import PolicyState, PolicyStatus, RunState, StatusWriter
from mutualrl.process.stop_signals import StopSignals
from mutualrl.recipes import Recipe
from mutualrl.reporting.progress import Progress
from mutualrl.see.liveness import HeartbeatMonitor, Phase
from mutualrl.sources.section import ServedSource
from mutualrl.sources.served import key_of
from mutualrl.storage.allocation import Allocation, Devices
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    import ray
    from ray.util.placement_group import PlacementGroup

POLL_SECONDS = 0.2
RESOURCE_WAIT_SECONDS = 30.0  # without training, before the policy's placement group is checked
SILENT_SECONDS = 5.0  # without a heartbeat: Ray is placing the policy, or its watch is about to end it
LOGS = "; its log is in Ray's session directory on its node, and in the dashboard"


@dataclass(kw_only=True)
class _RayPolicy(ManagedPolicy):
    """Policy on the cluster: its placement group, and the result of its attempt's task. A source has no group: it needs
    no core of its own, and is placed by its GPU."""

    resources: Resources
    group: PlacementGroup | None = None
    result: ray.ObjectRef[None] | None = None


def run_on_cluster(
    run: RunDirectory, recipe: Recipe, placement: Placement, session: int, console: Console, request: StopSignals
) -> None:
    """Run the policies on the connected cluster; end all of them if the run fails or is stopped."""
    launcher = _RayLauncher(run, recipe, placement, StatusWriter(run.root, session), console)
    head, names = HeadWatch(), [policy.name for policy in recipe.policies]
    try:
        launcher.start()
        limit = recipe.task.max_prompt_tokens
        with Progress(run, names, recipe.run.steps, console, recipe.regime_class.metrics, limit) as progress:
            deadline = None
            while launcher.active:
                if deadline is None and (request.received or run.stop_file.exists()):
                    deadline = time.monotonic() + recipe.run.round_timeout
                    launcher.stop()
                    request_stop(run, console)
                if len(request.received) > 1 or (deadline is not None and time.monotonic() > deadline):
                    break
                if (news := head.news()) is not None:
                    console.print(news, markup=False)
                launcher.poll()
                if head.answers:
                    launcher.check_absent(stopping=deadline is not None)
                progress.update()
        if request.received or run.stop_file.exists():
            raise RunInterruptedError(stopped(run, recipe, Launch(), request))
        launcher.status_writer.close(RunState.FINISHED)
    except MutualRLError as error:
        launcher.status_writer.close(f"{error.kind}: {error}")
        raise
    finally:
        launcher.end()


class _RayLauncher(Launcher[_RayPolicy]):
    """Launcher of the policies: turns ended tasks into events, and carries out what their lives demand."""

    def __init__(
        self, run: RunDirectory, recipe: Recipe, placement: Placement, status_writer: StatusWriter, console: Console
    ) -> None:
        policies = []
        for allocation in placement.allocations:
            policies.append(_RayPolicy(allocation=allocation, resources=_resources(allocation, placement)))
        for source in placement.sources:
            policies.append(_RayPolicy(allocation=source, source=True, resources=_resources(source, placement)))
        super().__init__(run, recipe, policies, status_writer, console)
        self._heartbeats = HeartbeatMonitor(run.exchange)
        self._trained: dict[str, float] = {}
        self._waiting_for_resources: set[str] = set()

    def start(self) -> None:
        """Start every policy that has not finished in an earlier session, whose error is forgotten."""
        for policy in self.managed_policies:
            self.run.policy(policy.name).failure.unlink(missing_ok=True)
        super().start()

    def poll(self) -> None:
        """Handle ended tasks and due restarts, and publish who sends heartbeats. Raises the error that ends the run."""
        import ray

        running = {policy.result: policy for policy in self.managed_policies if policy.state is PolicyState.RUNNING}
        if running:
            ended, _ = ray.wait(list(running), timeout=POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)
            ended = []
        for result in ended:
            self.handle(running[result], self._ending(running[result]))
        for policy in self.managed_policies:
            self.handle(policy, Tick(time.monotonic()))
            if policy.state is PolicyState.RUNNING:
                self._publish_liveness(policy)
        self.status_writer.beat()

    def end(self) -> None:
        """Remove every placement group."""
        for policy in self.managed_policies:
            self._remove_group(policy)

    def check_absent(self, *, stopping: bool) -> None:
        """Report policies that wait for resources of the cluster, and end them if a stop was requested. Raises
        PeerLostError for a policy that does not train: Ray would wait for resources without limit."""
        import ray

        for policy in self.managed_policies:
            if policy.state is not PolicyState.RUNNING:
                continue
            absent = time.monotonic() - self._trained.setdefault(policy.name, time.monotonic())
            if absent < RESOURCE_WAIT_SECONDS:
                self._waiting_for_resources.discard(policy.name)
            if policy.source:
                self._report_source(policy, absent)
                continue
            if absent < (1.0 if stopping else RESOURCE_WAIT_SECONDS):
                continue
            state = ray.util.placement_group_table(policy.group)["state"]
            if state != "CREATED" and stopping:
                self.handle(policy, Die(time.monotonic(), "it waited for resources", fresh=False))
            elif absent > self.recipe.run.round_timeout:
                raise PeerLostError(
                    f"policy {policy.name!r} has not trained for {absent:.0f} s (run.round_timeout); its placement "
                    f"group is {state}; --resume resumes the run"
                )
            elif state != "CREATED" and policy.name not in self._waiting_for_resources:
                self._waiting_for_resources.add(policy.name)
                self.say(f"policy {policy.name!r} waits for resources on the Ray cluster ({state})")

    def _report_source(self, policy: _RayPolicy, absent: float) -> None:
        """Report a source that is not ready: its policies wait for it, at most `run.round_timeout`."""
        if absent >= RESOURCE_WAIT_SECONDS and policy.name not in self._waiting_for_resources:
            self._waiting_for_resources.add(policy.name)
            _, phase = self._heartbeats.seconds_since(policy.name)
            self.say(f"source {policy.name!r} is not ready after {absent:.0f} s on the Ray cluster (phase: {phase})")

    # ---- the actions

    def start_attempt(self, policy: _RayPolicy) -> None:
        """Submit the task of an attempt: of a policy in a placement group with one bundle per rank; of a source with
        its key, which no other process gets."""
        import ray

        resources, allocation = policy.resources, policy.allocation
        if policy.source:
            keys = _keys(self.recipe, policy.name)
            task = PolicyTask(self.run, policy.name, allocation.threads, ray.util.get_node_ip_address(), keys)
            options = {"num_cpus": 0, "num_gpus": resources.get("GPU", 0), "max_retries": 0}
            answer = ray.remote(answer_source).options(name=f"mutualrl {policy.name}", **options)
            policy.result = answer.remote(task)
            return
        if policy.group is None:
            bundles = [resources] * allocation.processes
            policy.group = ray.util.placement_group(bundles, name=policy.name, strategy="PACK")
        train = in_bundle(train_policy, policy.group, 0, resources, name=f"mutualrl {policy.name}")
        task = PolicyTask(self.run, policy.name, allocation.threads, ray.util.get_node_ip_address())
        policy.result = train.remote(task, policy.group, resources)

    def end_attempt(self, policy: _RayPolicy) -> None:
        """Remove the placement group of a policy that is not restarted: a restart keeps its place in the cluster."""
        if not policy.life.active:
            self._remove_group(policy)

    def publish(self, policy: _RayPolicy) -> None:
        """Publish the state of a policy."""
        self._publish_as(policy, policy.state)

    def give_up_policy(self, policy: _RayPolicy) -> None:
        """Say that the run continues without a policy. Raises PeerLostError if it cannot."""
        failure = failure_of(self.run, policy.name)
        cause = policy.life.reason if failure is None else failure[1]
        message = f"policy {policy.name!r} died, with no restart left (run.max_restarts): {cause}{LOGS}"
        if not self.may_continue_without(policy):
            raise PeerLostError(message)
        self.say(f"{message}\nIt is lost; the others continue without it (run.on_peer_loss: continue)")

    # ---- from what is seen to an event

    def _ending(self, policy: _RayPolicy) -> Event:
        """Return how a policy's task ended. Raises the error that ends the run."""
        import ray

        name, reason, code = policy.name, f"policy {policy.name!r} ended without a result", None
        try:
            ray.get(policy.result)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            reason = str(cause)
            code = cause.code if isinstance(cause, PolicyDiedError) else None
        except ray.exceptions.RayError as error:
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"policy {name!r}: {first}"
        if self.run.policy(name).result.exists():
            return Finish()
        if self.run.stop_file.exists():  # seen by the policy before it was seen here
            self.stop()
        own = None if policy.life.stopping else own_error(self.run, name, code, LOGS)
        if own is not None and not (self.may_lose(policy) and own.kind != RewardError.kind):
            raise own
        _, phase = self._heartbeats.seconds_since(name)
        return Die(time.monotonic(), reason, fresh=phase not in (Phase.NOT_STARTED, Phase.LOADING))

    def _publish_liveness(self, policy: _RayPolicy) -> None:
        """Publish whether a policy sends heartbeats: without them, it is being placed."""
        silent, phase = self._heartbeats.seconds_since(policy.name)
        absent = silent > SILENT_SECONDS or Phase.NOT_STARTED.is_in(phase)
        self._publish_as(policy, PolicyState.RESTARTING if absent else PolicyState.RUNNING)
        if not absent and not Phase.LOADING.is_in(phase):
            self._trained[policy.name] = time.monotonic()

    def _publish_as(self, policy: _RayPolicy, state: PolicyState) -> None:
        """Publish a state of a policy if it has changed."""
        if self.status_writer.statuses.get(policy.name) != PolicyStatus(state):
            self.status_writer.publish(policy.name, PolicyStatus(state))

    def _remove_group(self, policy: _RayPolicy) -> None:
        """Remove a policy's placement group, which ends its running tasks."""
        import ray

        if policy.group is None:
            return
        # ray.cancel of a task that completes at this moment ends this process (ray-project/ray#54798)
        try:
            ray.util.remove_placement_group(policy.group)
        except ray.exceptions.RayError as error:  # still end the others
            self.say(f"the placement group of {policy.name!r} was not removed: {error}")
        policy.group = None


def bundles(placement: Placement) -> list[Resources]:
    """Return the resources of each process of the pool. Raises MachineError if ranks of one policy could share a GPU:
    Ray packs fractions onto one GPU before it uses the next."""
    for allocation in placement.allocations:
        if allocation.gpus and allocation.processes > 1 and _resources(allocation, placement)["GPU"] < 1:
            raise MachineError(
                f"--launcher ray: policy {allocation.policy!r} shares its {allocation.processes} GPUs with others; "
                "expected a GPU or more for each policy (more nodes, or a smaller pool; without --set "
                "launch.share_gpus=true), or one GPU for all: --set hardware.gpus=1"
            )
    members = [(each, each.processes) for each in (*placement.allocations, *placement.sources)]
    return [_resources(devices, placement) for devices, processes in members for _ in range(processes)]


def _resources(devices: Devices, placement: Placement) -> Resources:
    """Return the resources of one process of a policy: its threads, and its GPU or fraction of one; of a source its GPU
    or fraction alone. Policies and frozen sources on one GPU have equal fractions."""
    resources = {"CPU": float(devices.threads) if isinstance(devices, Allocation) else 0.0}
    if devices.gpus and isinstance(devices, Allocation) and devices.memory:
        resources["GPU"] = devices.memory
    elif devices.gpus:
        others = [each for each in (*placement.allocations, *placement.sources) if set(each.gpus) & set(devices.gpus)]
        resources["GPU"] = 1.0 / len(others)
    return resources


def _keys(recipe: Recipe, name: str) -> dict[str, str]:
    """Return the environment variable that has the key of a served source; none for other sources."""
    (section,) = [each for each in recipe.asked_sources if each.name == name]
    if not isinstance(section, ServedSource) or section.api_key_env is None:
        return {}
    return {section.api_key_env: str(key_of(section.api_key_env, name))}
