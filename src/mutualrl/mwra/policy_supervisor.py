"""Supervision of a run's policies: start, poll, restart, give up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.errors import MutualRLError, PeerLostError, RewardError, exit_code_of
from mutualrl.mwra.group import (
    CONSEQUENCES,
    ProcessGroup,
    ProcessTag,
    agent,
    back_off,
    clear_attempt,
    describe_death,
    end,
    failure_of,
    next_attempt,
    reward_failure,
    tail,
)
from mutualrl.mwra.placement import Allocation
from mutualrl.mwra.watch import Watch
from mutualrl.process.status import PolicyStatus, StatusWriter
from mutualrl.recipes import Recipe
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import require_writable
from mutualrl.storage.rundir import RunDirectory

#: wait before the handling of a policy that ended because of a peer: the peer is handled first
CAUSE_SECONDS = 1.0


@dataclass
class ManagedPolicy:
    """Supervised policy. `due`: time of its next restart, on the monotonic clock; `died`: time of its first death
    since it last got past its start; `reason`: why it was given up."""

    allocation: Allocation
    watch: Watch
    attempt: int = 0
    state: str = "starting"
    group: ProcessGroup | None = None
    restarts: int = 0
    due: float | None = None
    died: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """Return the policy's name."""
        return self.allocation.policy


class PolicySupervisor:
    """Supervisor of the policies: starts, polls and restarts them, or gives them up."""

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        allocations: tuple[Allocation, ...],
        status_writer: StatusWriter,
        console: Console,
        start: Callable[[RunDirectory, Allocation, int], ProcessGroup] = agent,
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.managed_policies = [
            ManagedPolicy(allocation, Watch(run.exchange, allocation.policy, recipe.run, self._print))
            for allocation in allocations
        ]
        self.stopping = False
        self._status_writer = status_writer
        self._console = console
        self._start_group = start

    @property
    def groups(self) -> list[ProcessGroup]:
        """Return the process groups that were started."""
        return [m.group for m in self.managed_policies if m.group is not None]

    @property
    def active(self) -> bool:
        """Return whether a policy is running or will run."""
        return any(m.state in ("starting", "running", "restarting") for m in self.managed_policies)

    def start(self) -> None:
        """Start every policy that has not finished in an earlier session."""
        for managed in self.managed_policies:
            if self.run.policy(managed.name).result.exists():
                self._set_state(managed, "finished")
            else:
                self._start(managed)

    def poll(self) -> None:
        """Poll every policy once. Raises the error that ends the run."""
        self._status_writer.beat()
        for managed in sorted(self.managed_policies, key=self._is_consequence):  # causes first
            if managed.state == "running":
                self._poll_one(managed)
            elif managed.state == "restarting" and self.stopping:
                self._set_state(managed, "stopped")
            elif managed.state == "restarting" and managed.due is not None and time.monotonic() >= managed.due:
                self._start(managed)

    def lost(self) -> dict[str, str]:
        """Return the policies that were given up, with the reasons."""
        return {m.name: m.reason for m in self.managed_policies if m.state == "lost"}

    # ---- one policy

    def _start(self, managed: ManagedPolicy) -> None:
        if managed.group is not None:  # its agent has ended, but a worker may still run
            end([managed.group], self._tag(managed), grace=0)
        managed.attempt = next_attempt(self.run, managed.name)
        clear_attempt(self.run, managed.name)
        managed.watch.reset()
        managed.group = self._start_group(self.run, managed.allocation, managed.attempt)
        managed.due = None
        self._set_state(managed, "running")

    def _tag(self, managed: ManagedPolicy) -> ProcessTag:
        return ProcessTag(str(self.run.root), managed.name)

    def _set_state(self, managed: ManagedPolicy, state: str) -> None:
        managed.state = state
        self._status_writer.publish(managed.name, PolicyStatus(state, managed.attempt))

    def _poll_one(self, managed: ManagedPolicy) -> None:
        assert managed.group is not None
        code = managed.group.exit_code()
        silent = managed.watch.frozen_for() if code is None else None
        stalled = managed.watch.stalled_for() if code is None and silent is None else None
        if (code is not None or silent is not None) and self.run.policy(managed.name).result.exists():
            self._finish(managed, silent)
        elif code == 0:  # e.g. a reward function that calls os._exit(0)
            self._ended(managed, "died (exit code 0, before its result was written)")
        elif code is not None:
            self._ended(managed, describe_death(self.run, managed.name, code))
        elif silent is not None:
            self._ended(managed, f"is frozen: no heartbeat for {silent}")
        elif stalled is not None:
            self._ended(managed, f"is alive but hangs: {stalled}")

    def _finish(self, managed: ManagedPolicy, silent: str | None) -> None:
        """Mark a policy as finished: its result is written, whether or not it has exited cleanly."""
        assert managed.group is not None
        if silent is not None:
            self._print(f"policy {managed.name!r} wrote its result but did not exit: no heartbeat for {silent}")
            end([managed.group], self._tag(managed), grace=0)
        elif code := managed.group.exit_code():
            self._print(f"policy {managed.name!r} wrote its result and ended with exit code {code}")
        self._set_state(managed, "finished")

    def _ended(self, managed: ManagedPolicy, event: str) -> None:
        """Handle the end of a process group, described by `event`: a requested stop, an error of the run, or a
        restart."""
        assert managed.group is not None
        if self.stopping:
            end([managed.group], self._tag(managed), grace=0)
            self._set_state(managed, "stopped")
            return
        error = self._error_of(managed)
        if error is not None:
            raise error
        for directory in (self.run.exchange / managed.name, self.run.policy(managed.name).root):
            require_writable(directory)  # on a full disk a policy looks frozen and cannot write its error
        text = f"policy {managed.name!r} {event}; log: {managed.group.log}\n{tail(managed.group.log)}"
        end([managed.group], self._tag(managed), grace=0)  # e.g. a frozen worker, other ranks, an engine
        managed.died = time.monotonic() if managed.died is None or managed.watch.past_its_start() else managed.died
        self._restart_or_give_up(managed, text)

    def _restart_or_give_up(self, managed: ManagedPolicy, text: str) -> None:
        section, now = self.recipe.run, time.monotonic()
        pause = back_off(managed.restarts)
        peers_wait = section.on_peer_loss == "wait"
        assert managed.died is not None
        deadline = managed.died + section.round_timeout
        if managed.restarts < section.max_restarts or (peers_wait and now + pause < deadline):
            managed.restarts += 1
            managed.due = now + pause
            step = max(Checkpoints(self.run.policy(managed.name).root).steps(), default=0)
            limit = "until run.round_timeout" if peers_wait else f"{managed.restarts} of {section.max_restarts}"
            self._print(f"{text}\nRestarting in {pause:.0f} s from step {step} (restart {limit})")
            self._set_state(managed, "restarting")
            return
        managed.reason = text.partition("\n")[0]
        self._set_state(managed, "lost")
        if section.on_peer_loss == "continue" and self._others_left(managed):
            self._print(f"{text}\nIt is lost; the others continue without it (run.on_peer_loss: continue)")
            return
        message, _, log_tail = text.partition("\n")
        used = f"; {managed.restarts} restart(s) used" if section.max_restarts else ""
        raise PeerLostError(f"{message}{used}\n{log_tail}")

    def _others_left(self, managed: ManagedPolicy) -> bool:
        """Return whether another policy can continue."""
        states = ("starting", "running", "restarting", "finished")
        return any(other.state in states for other in self.managed_policies if other is not managed)

    def _error_of(self, managed: ManagedPolicy) -> MutualRLError | None:
        """Return the error in a policy's failure file, or None for a death that a restart may fix, including one that
        another policy caused."""
        assert managed.group is not None
        failure = failure_of(self.run, managed.name)
        code = managed.group.exit_code()
        crash = None if failure is not None or code is None else reward_failure(self.run, managed.name, code)
        if crash is not None:
            return RewardError(f"policy {managed.name!r}: {crash}\nlog: {managed.group.log}\n{tail(managed.group.log)}")
        if failure is None or failure[0] == "died":
            return None
        kind, message = failure
        if kind in CONSEQUENCES:
            time.sleep(CAUSE_SECONDS)  # handle the cause first
            if self._another_died(managed):
                return None
        exit_code = exit_code_of(kind)
        error = MutualRLError(f"policy {managed.name!r} failed (exit code {code}): {message}\nlog: {managed.group.log}")
        error.kind, error.exit_code = (
            (kind, exit_code) if exit_code is not None else (PeerLostError.kind, PeerLostError.exit_code)
        )
        return error

    def _is_consequence(self, managed: ManagedPolicy) -> bool:
        """Return whether a policy has ended because another did, according to its own failure file."""
        failure = failure_of(self.run, managed.name) if self._has_failed(managed) else None
        return failure is not None and failure[0] in CONSEQUENCES

    def _another_died(self, managed: ManagedPolicy) -> bool:
        """Return whether another policy died and is being restarted or has not been handled yet."""
        for other in self.managed_policies:
            died = other.state == "restarting" or (self._has_failed(other) and not self._is_consequence(other))
            if other is not managed and died:
                return True
        return False

    def _has_failed(self, managed: ManagedPolicy) -> bool:
        """Return whether a policy's process group has ended with an error that has not been handled yet."""
        return managed.state == "running" and managed.group is not None and bool(managed.group.exit_code())

    def _print(self, message: str) -> None:
        print_text(self._console, message)
