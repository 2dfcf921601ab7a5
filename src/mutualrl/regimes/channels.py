"""Several regimes combined: `--regime xgrpo+sgt`, or in a recipe `regime: [xgrpo, {name: sgt, weight: 0.05}]`.

Each regime receives the advantages of the one before it, in the given order. Rows are concatenated, metrics merged,
states kept separate. Invalid combinations are rejected with the regimes' names.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pydantic import create_model

from mutualrl.errors import RegimeError
from mutualrl.regimes.needs import Needs, Treatment
from mutualrl.regimes.regime import SELECTION, Conditions, Regime, Variants
from mutualrl.regimes.round import ExtraRow, GuideView, Plan, Requests, RoundView, RowStatistics
from mutualrl.rollouts import Rollouts
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory

SEPARATOR = "+"
#: what may follow a regime that treats advantages in some way; every other regime would discard them
FOLLOWERS: dict[Treatment, tuple[Treatment, ...]] = {
    "keeps": ("keeps", "adjusts", "sets", "builds the batch"),
    "adjusts": ("keeps", "adjusts"),
    "sets": ("keeps", "adjusts"),
    "builds the batch": ("keeps", "adjusts"),
}
View = TypeVar("View", RoundView, GuideView)


class Channels(Regime):
    """Regime that loops over its `parts`, whose settings are its fields by their names."""

    parts: ClassVar[tuple[type[Regime], ...]] = ()

    @property
    def regimes(self) -> list[Regime]:
        """Return the parts with their settings, in order."""
        return [getattr(self, part.name) for part in self.parts]

    def needs(self) -> Needs:
        """Return what the parts need; on all prompts, a part that can use a source wants its texts."""
        needs = functools.reduce(operator.or_, (part.needs() for part in self.regimes))
        usable = [part.needs() for part in self.regimes if part.source_problem() is None]
        return replace(needs, everywhere=any(each.everywhere for each in usable))

    def requests(self, view: RoundView) -> Requests:
        """Return the parts' requests."""
        requests = [part.requests(_of_part(view, part)) for part in self.regimes]
        return Requests(*(tuple(itertools.chain(*kind)) for kind in zip(*requests, strict=True)))

    def plan(self, view: RoundView) -> Plan:
        """Return the parts' plans as one."""
        advantages: tuple[float, ...] | None = None
        rows: list[ExtraRow] = []
        metrics: dict[str, float] = {}
        states = dict(view.state)
        by_token: dict[int, Any] = {}
        for part in self.regimes:
            plan = part.plan(_of_part(view, part))
            if plan.advantages is not None:
                advantages = plan.advantages
                view = replace(view, rollouts=view.rollouts.with_advantages(advantages))
            rows += plan.rows
            metrics |= plan.metrics
            by_token |= plan.token_advantages
            if plan.state is not None:
                states[part.name] = plan.state
        return Plan(advantages, tuple(rows), metrics, states if states != dict(view.state) else None, by_token)

    def prefixes(self, view: GuideView) -> list[tuple[int, ...]]:
        """Return the prefixes of the part that has some."""
        guide = next(part for part in self.regimes if part.needs().guides)
        return guide.prefixes(_of_part(view, guide))

    def replays(self, view: GuideView) -> list[Trajectory | None]:
        """Return the turns that the part which has some replays."""
        guide = next(part for part in self.regimes if part.needs().guides)
        return guide.replays(_of_part(view, guide))

    def row_metrics(self, statistics: RowStatistics) -> dict[str, float]:
        """Return the parts' metrics of the extra rows."""
        return {key: value for part in self.regimes for key, value in part.row_metrics(statistics).items()}

    def source_problem(self, traits: SourceTraits = SELECTION) -> str | None:
        """Return why no part can use a source; the others do not see it."""
        problems = [part.source_problem(traits) for part in self.regimes]
        return None if None in problems else next((problem for problem in problems if problem is not None), None)

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return the prompts on which a part that can use a source wants its texts."""
        parts = [part for part in self.regimes if part.source_problem() is None]
        return sorted({prompt_id for part in parts for prompt_id in part.unsolved(rollouts)})

    @classmethod
    def requests_anything(cls) -> bool:
        """Return whether a part makes requests."""
        return any(part.requests_anything() for part in cls.parts)

    @classmethod
    def acts_with(cls) -> Conditions:
        """Return the parts' conditions, with their settings' full names."""
        conditions = {}
        for part in cls.parts:
            for key, (other, value) in part.acts_with().items():
                conditions[f"{part.name}.{key}"] = (f"{part.name}.{other}", value)
        return conditions

    @classmethod
    def variants(cls) -> Variants:
        """Return the parts' variants, with their settings' full names."""
        return {f"{part.name}.{key}": values for part in cls.parts for key, values in part.variants().items()}


def _of_part(view: View, part: Regime) -> View:
    """Return the view of a part: with its own state, and without the sources that it cannot use."""
    view = replace(view, state=view.state.get(part.name, {}))
    if isinstance(view, RoundView) and view.sources:
        unusable = [name for name, traits in view.sources.items() if part.source_problem(traits) is not None]
        return view.without_sources(unusable)
    return view


def combined(parts: Sequence[type[Regime]]) -> type[Channels]:
    """Return the regime that runs all of `parts`. Raises RegimeError if they cannot be combined."""
    _require_combinable(parts)
    fields: Any = {part.name: (part, part()) for part in parts}
    channels: type[Channels] = create_model("Channels", __base__=Channels, **fields)
    channels.parts = tuple(parts)
    channels.name = SEPARATOR.join(part.name for part in parts)
    channels.summary = "; ".join(part.summary for part in parts)
    channels.metrics = tuple(metric for part in parts for metric in part.metrics)
    return channels


def _require_combinable(parts: Sequence[type[Regime]]) -> None:
    names = [part.name for part in parts]
    joined = SEPARATOR.join(names)
    if len(set(names)) < len(names):
        raise RegimeError(f"regime {joined!r}: the same regime twice; name each once")
    needs = {part.name: part().needs() for part in parts}
    for name, each in needs.items():
        if not each.shares:
            raise RegimeError(f"regime {joined!r}: {name!r} shares nothing; leave it out")
    building = [name for name, each in needs.items() if each.advantages == "builds the batch"]
    if len(building) > 1:
        raise RegimeError(
            f"regime {joined!r}: {' and '.join(map(repr, building))} each build the whole batch; expected one of them"
        )
    guides = [name for name, each in needs.items() if each.guides]
    if len(guides) > 1:
        raise RegimeError(f"regime {joined!r}: {' and '.join(map(repr, guides))} both prefix the learner's rollouts")
    if guides and building:
        raise RegimeError(
            f"regime {joined!r}: {guides[0]!r} prefixes rollouts, and {building[0]!r} treats them as sampled in full; "
            "expected one of the two"
        )
    judging = [name for name, each in needs.items() if each.scores]
    moving = [name for name, each in needs.items() if each.advantages != "keeps" or each.guides]
    if judging and (len(judging) > 1 or moving):
        others = ", ".join(repr(name) for name in [*judging[1:], *moving])
        raise RegimeError(
            f"regime {joined!r}: {judging[0]!r} adds to advantages of groups whose rewards are all equal, which "
            f"{others} would change; expected one of them"
        )
    _require_followers(joined, {name: each for name, each in needs.items() if each.advantages != "keeps"})


def _require_followers(joined: str, moving: Mapping[str, Needs]) -> None:
    """Raise RegimeError for a regime that would discard or change the advantages of the one before it."""
    for first, second in itertools.pairwise(moving):
        before, after = moving[first], moving[second]
        if after.advantages in FOLLOWERS[before.advantages] and not before.weighs_groups:
            continue
        if after.advantages == "builds the batch":
            raise RegimeError(f"regime {joined!r}: {second!r} would discard the advantages of {first!r}; put it first")
        raise RegimeError(
            f"regime {joined!r}: {second!r} would discard or change the advantages of {first!r}; "
            "expected one of the two"
        )
