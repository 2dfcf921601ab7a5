"""What every launcher does with the lives of its policies: it feeds them events and carries out the actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.errors import SourceLostError
from mutualrl.launch.life import Action, Begin, Event, Finish, Life, Stop, advance, may_continue, restart_message
from mutualrl.process.status import PolicyState, StatusWriter
from mutualrl.recipes import Recipe
from mutualrl.storage.allocation import Devices
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.rundir import RunDirectory


@dataclass(kw_only=True)
class ManagedPolicy:
    """Policy of a launcher, or a source that is asked: its devices and its life. `source`: it is a source; the run ends
    without it."""

    allocation: Devices
    source: bool = False
    life: Life = field(default_factory=Life)

    @property
    def name(self) -> str:
        """Return the policy's name."""
        return self.allocation.policy

    @property
    def state(self) -> PolicyState:
        """Return the state of its life."""
        return self.life.state


Managed = TypeVar("Managed", bound=ManagedPolicy)


class Launcher(ABC, Generic[Managed]):
    """Launcher of a run's policies. A subclass observes them and says how an attempt starts, ends and is given up."""

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        policies: Sequence[Managed],
        status_writer: StatusWriter,
        console: Console,
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.managed_policies = policies
        self.status_writer = status_writer
        self._console = console

    @property
    def active(self) -> bool:
        """Return whether a policy is running or will run; no source outlives the policies that it runs beside."""
        policies = [managed for managed in self.managed_policies if not managed.source]
        return any(managed.life.active for managed in policies or self.managed_policies)

    def start(self) -> None:
        """Start every policy that has not finished in an earlier session, and every source: a policy may go back to
        rounds that a finished source has not answered."""
        for managed in self.managed_policies:
            if managed.source:
                self.run.asked_source(managed.name).mkdir(parents=True, exist_ok=True)
                self.run.policy(managed.name).result.unlink(missing_ok=True)
            finished = self.run.policy(managed.name).result.exists()
            self.handle(managed, Finish() if finished else Begin())

    def stop(self) -> None:
        """Restart no policy from now on; those that run save a checkpoint and end on their own."""
        for managed in self.managed_policies:
            self.handle(managed, Stop())

    def handle(self, managed: Managed, event: Event) -> None:
        """Let an event change a policy's life, carry out the actions, and publish a new state. Raises PeerLostError if
        the run cannot go on without the policy."""
        before = managed.state
        managed.life, actions = advance(managed.life, event, self.recipe.run)
        for action in actions:
            match action:
                case Action.START:
                    self.start_attempt(managed)
                case Action.END:
                    self.end_attempt(managed)
                case Action.RESTART:
                    step = max(Checkpoints(self.run.policy(managed.name).root).steps(), default=0)
                    self.say(restart_message(managed.life, step, self.recipe.run))
                case Action.GIVE_UP:
                    self.publish(managed)
                    self.give_up(managed)
        if managed.state is not before:
            self.publish(managed)

    def may_continue_without(self, managed: Managed) -> bool:
        """Return whether the run goes on without a lost policy; a source cannot take its place."""
        others = (each.state for each in self.managed_policies if each is not managed and not each.source)
        return may_continue(others, self.recipe.run)

    def may_lose(self, managed: Managed) -> bool:
        """Return whether it is a source without which the run here continues."""
        if all(each.source for each in self.managed_policies):
            return False
        sections = [each for each in self.recipe.asked_sources if managed.source and each.name == managed.name]
        return any(each.on_source_loss == "continue" for each in sections)

    def give_up(self, managed: Managed) -> None:
        """Say that the run continues without a policy or a source. Raises PeerLostError or SourceLostError if it
        cannot."""
        if not managed.source:
            self.give_up_policy(managed)
            return
        setting, reason = f"sources.{managed.name}.on_source_loss", managed.life.reason
        if not self.may_lose(managed):
            raise SourceLostError(f"{reason} ({setting}: fail)")
        self.say(f"{reason}\nThe run continues without it ({setting}: continue)")

    def say(self, message: str) -> None:
        """Print a message for the user."""
        print_text(self._console, message)

    @abstractmethod
    def start_attempt(self, managed: Managed) -> None:
        """Start an attempt of a policy."""

    @abstractmethod
    def end_attempt(self, managed: Managed) -> None:
        """End what is left of a policy's last attempt."""

    @abstractmethod
    def give_up_policy(self, managed: Managed) -> None:
        """Say that the run continues without a policy. Raises PeerLostError if it cannot."""

    @abstractmethod
    def publish(self, managed: Managed) -> None:
        """Publish the state of a policy."""
