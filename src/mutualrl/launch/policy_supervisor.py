"""Supervision of a run's policies and asked sources on this machine: observe their processes, and do what their life
demands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from mutualrl.errors import PeerLostError, RewardError
from mutualrl.launch.death import CONSEQUENCES, describe_death, failure_of, member, own_error, recorded_error, tail
from mutualrl.launch.group import ProcessGroup, ProcessTag, agent, clear_attempt, end, next_attempt
from mutualrl.launch.launcher import Launcher, ManagedPolicy
from mutualrl.launch.life import Die, Event, Finish, Tick
from mutualrl.launch.watch import WatchedRun
from mutualrl.mwra.placement import Placement
from mutualrl.process.status import PolicyState, PolicyStatus, StatusWriter
from mutualrl.recipes import Recipe
from mutualrl.storage.allocation import Devices
from mutualrl.storage.files import require_writable
from mutualrl.storage.rundir import RunDirectory

#: wait before the handling of a policy that ended because of a peer: the peer is handled first
CAUSE_SECONDS = 1.0


@dataclass(kw_only=True)
class SupervisedPolicy(ManagedPolicy):
    """Policy on this machine: the watch over it, its newest attempt, and the process group of that attempt."""

    watch: WatchedRun
    attempt: int = 0
    group: ProcessGroup | None = None


class PolicySupervisor(Launcher[SupervisedPolicy]):
    """Supervisor of the policies: starts, polls and restarts them, or gives them up."""

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        placement: Placement,
        status_writer: StatusWriter,
        console: Console,
        start: Callable[[RunDirectory, Devices, int], ProcessGroup] = agent,
    ) -> None:
        policies = []
        for allocation in (*placement.allocations, *placement.sources):
            watch = WatchedRun(run.exchange, allocation.policy, recipe.run, self.say)
            source = allocation in placement.sources
            policies.append(SupervisedPolicy(allocation=allocation, watch=watch, source=source))
        super().__init__(run, recipe, policies, status_writer, console)
        self._start_group = start

    @property
    def groups(self) -> list[ProcessGroup]:
        """Return the process groups that were started."""
        return [m.group for m in self.managed_policies if m.group is not None]

    def poll(self) -> None:
        """Poll every policy once. Raises the error that ends the run."""
        self.status_writer.beat()
        for managed in sorted(self.managed_policies, key=self._is_consequence):  # causes first
            running = managed.state is PolicyState.RUNNING
            event = self._observe(managed) if running else Tick(time.monotonic())
            if event is not None:
                self.handle(managed, event)

    def lost(self) -> dict[str, str]:
        """Return the policies that were given up, with the reasons."""
        lost = [m for m in self.managed_policies if m.state is PolicyState.LOST]
        return {m.name: m.life.reason.partition("\n")[0] for m in lost}

    # ---- the actions

    def start_attempt(self, managed: SupervisedPolicy) -> None:
        """Start the process group of a new attempt."""
        if managed.group is not None:  # its agent has ended, but a worker may still run
            self.end_attempt(managed)
        managed.attempt = next_attempt(self.run, managed.name)
        clear_attempt(self.run, managed.name)
        managed.watch.reset()
        managed.group = self._start_group(self.run, managed.allocation, managed.attempt)

    def end_attempt(self, managed: SupervisedPolicy) -> None:
        """End the process group and all processes of the policy, e.g. a frozen worker, other ranks, an engine."""
        assert managed.group is not None
        end([managed.group], ProcessTag(str(self.run.root), managed.name), grace=0)

    def publish(self, managed: SupervisedPolicy) -> None:
        """Publish the state and the attempt of a policy."""
        self.status_writer.publish(managed.name, PolicyStatus(managed.state, managed.attempt))

    def give_up_policy(self, managed: SupervisedPolicy) -> None:
        """Say that the run continues without a policy. Raises PeerLostError if it cannot."""
        section, text = self.recipe.run, managed.life.reason
        if self.may_continue_without(managed):
            self.say(f"{text}\nIt is lost; the others continue without it (run.on_peer_loss: continue)")
            return
        message, _, log_tail = text.partition("\n")
        used = f"; {managed.life.restarts} restart(s) used" if section.max_restarts else ""
        raise PeerLostError(f"{message}{used}\n{log_tail}")

    # ---- from what is seen to an event

    def _observe(self, managed: SupervisedPolicy) -> Event | None:
        """Return what has happened to a running policy, or None. Raises the error that ends the run."""
        assert managed.group is not None
        code = managed.group.exit_code()
        silent = managed.watch.frozen_for() if code is None else None
        stalled = managed.watch.stalled_for() if code is None and silent is None else None
        if (code is not None or silent is not None) and self.run.policy(managed.name).result.exists():
            if silent is not None:
                self.say(f"policy {managed.name!r} wrote its result but did not exit: no heartbeat for {silent}")
            elif code:
                self.say(f"policy {managed.name!r} wrote its result and ended with exit code {code}")
            return Finish()
        if code == 0:  # e.g. a reward function that calls os._exit(0)
            return self._death(managed, "died (exit code 0, before its result was written)")
        if code is not None:
            return self._death(managed, describe_death(self.run, managed.name, code))
        if silent is not None:
            return self._death(managed, f"is frozen: no heartbeat for {silent}")
        if stalled is not None:
            return self._death(managed, f"is alive but hangs: {stalled}")
        return None

    def _death(self, managed: SupervisedPolicy, how: str) -> Die:
        """Return the death of a policy that ended as `how` says. Raises the error of the run, if that was its cause."""
        assert managed.group is not None
        log = managed.group.log
        if not managed.life.stopping:
            self._raise_own_error(managed)
            for directory in (self.run.exchange / managed.name, self.run.policy(managed.name).root):
                require_writable(directory)  # on a full disk a policy looks frozen and cannot write its error
        reason = f"policy {managed.name!r} {how}; log: {log}\n{tail(log)}"
        return Die(time.monotonic(), reason, fresh=managed.watch.past_its_start())

    def _raise_own_error(self, managed: SupervisedPolicy) -> None:
        """Raise the error of a policy whose restart would end in the same way."""
        assert managed.group is not None
        code, log = managed.group.exit_code(), managed.group.log
        if (error := own_error(self.run, managed.name, code, f"\nlog: {log}\n{tail(log)}")) is not None:
            if self.may_lose(managed) and error.kind != RewardError.kind:
                return  # started again, then given up
            raise error
        failure = failure_of(self.run, managed.name)
        if failure is None or failure[0] not in CONSEQUENCES:
            return
        time.sleep(CAUSE_SECONDS)  # handle the cause first
        if not self._another_died(managed):
            raise recorded_error(member(self.run, managed.name), failure, code, f"\nlog: {log}")

    def _is_consequence(self, managed: SupervisedPolicy) -> bool:
        """Return whether a policy has ended because another did, according to its own failure file."""
        failure = failure_of(self.run, managed.name) if self._has_failed(managed) else None
        return failure is not None and failure[0] in CONSEQUENCES

    def _another_died(self, managed: SupervisedPolicy) -> bool:
        """Return whether another policy died and is being restarted or has not been handled yet."""
        for other in self.managed_policies:
            died = other.state is PolicyState.RESTARTING or (
                self._has_failed(other) and not self._is_consequence(other)
            )
            if other is not managed and died:
                return True
        return False

    def _has_failed(self, managed: SupervisedPolicy) -> bool:
        """Return whether a policy's process group has ended with an error that has not been handled yet."""
        return managed.state is PolicyState.RUNNING and managed.group is not None and bool(managed.group.exit_code())
