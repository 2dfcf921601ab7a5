"""What one process of a run works for: a policy that trains, by a recipe or a script, or a source that answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mutualrl.recipes import Recipe
from mutualrl.see import Exchange, Heartbeat, MissingPeers, ReadLog
from mutualrl.storage.files import JsonObject, write_checksummed
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import PolicyFiles, RunDirectory
from mutualrl.training.peers import PeerLink


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a run, as its process knows it."""

    run: RunDirectory
    exchange: Exchange
    heartbeat: Heartbeat
    """The heartbeat of this rank."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the run was asked to stop."""

    @property
    def name(self) -> str:
        """Return its name in the pool."""
        return self.exchange.policy

    @property
    def files(self) -> PolicyFiles:
        """Return the paths of its files."""
        return self.run.policy(self.name)

    def link(
        self, peers: Sequence[str], *, asked: Collection[str] = (), staleness: int = 0, how_to_start: str = ""
    ) -> PeerLink:
        """Return its link to the members whose rounds it reads, those that are `asked` included."""
        store = self.exchange.store
        return PeerLink(
            self.exchange,
            [*peers, *asked],
            self.heartbeat,
            self.stopping,
            MissingPeers(store, self.name),
            staleness,
            ReadLog(store, self.name),
            how_to_start,
            asked,
        )

    def finish(self, result: JsonObject) -> None:
        """Write its result, after which it is finished."""
        write_checksummed(self.files.result, result, root=self.run.root)


@dataclass(frozen=True, kw_only=True)
class PlannedMember(Member):
    """A member of a run that a recipe describes."""

    info: RunInfo
    """Content of run.json when the process began."""
    recipe: Recipe
    """The recipe that the start resolved."""
