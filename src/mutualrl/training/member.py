"""What one process of a run works for: a policy that trains, or a source that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mutualrl.recipes import Recipe
from mutualrl.see import Exchange, Heartbeat
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import PolicyFiles, RunDirectory


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a run, as its process knows it."""

    name: str
    """Its name in the recipe."""
    run: RunDirectory
    info: RunInfo
    """Content of run.json when the process began."""
    recipe: Recipe
    """The recipe that the start resolved."""
    exchange: Exchange
    heartbeat: Heartbeat
    """The heartbeat of this rank."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the run was asked to stop."""

    @property
    def files(self) -> PolicyFiles:
        """Return the paths of its files."""
        return self.run.policy(self.name)
