"""Declaration of a regime: its name, settings, what it publishes and reads, its plan, its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from mutualrl.records import PublishSchema
from mutualrl.regimes.round import GuideView, Needs, Plan, RoundView, RowStatistics

#: (key of the trainer's settings, problem)
Problem = tuple[str, str]


class RegimeSettings(BaseModel):
    """Base of the settings under `regime:` in a recipe; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


@dataclass(frozen=True, slots=True)
class Metric:
    """Number that a regime logs per round or optimizer step.

    `panel`: title of its plot in reports; None: logged only. `role`: `gate_rate` (fraction of prompts whose gate
    opened), `rescues` (rows learnt) or `action` (another number that is 0 while the regime changes nothing), by which
    progress lines and reports find it in any regime.
    """

    key: str
    unit: str
    meaning: str
    panel: str | None = None
    role: Literal["gate_rate", "rescues", "action"] | None = None


#: default reward above which a rollout is a success (paper, "Hyperparameters")
SUCCESS_ABOVE = 0.8


def publishes_nothing(settings: RegimeSettings) -> PublishSchema:
    """Publish only rewards."""
    return PublishSchema()


def learns_no_solutions(settings: RegimeSettings) -> None:
    """Return None: the solutions in the data are not read."""


def no_problems(settings: RegimeSettings, trainer: Mapping[str, Any]) -> Sequence[Problem]:
    """Accept every setting of the trainer."""
    return ()


def needs_nothing(view: RoundView, settings: RegimeSettings) -> Needs:
    """Plan from the exchange's data alone."""
    return Needs()


def needs_same_prompts(settings: RegimeSettings) -> bool:
    """Return True: a peer that saw other prompts in a round ends the run."""
    return True


def never_late(settings: RegimeSettings) -> bool:
    """Return False: the peers' rollouts are needed within the round."""
    return False


def always_late(settings: RegimeSettings) -> bool:
    """Return True: a peer's round may arrive after the learner's own."""
    return True


def no_row_metrics(statistics: RowStatistics) -> Mapping[str, float]:
    """Log nothing about the extra rows."""
    return {}


@dataclass(frozen=True, slots=True)
class RegimeSpec:
    """Regime as the rest of the system sees it.

    name, summary: its name and a one-line description.
    settings: the pydantic model of its keys under `regime:`.
    plan: pure function from a view of the round to additions to the learner's update; None changes nothing.
    publishes: the optional fields of a rollout that its peers read.
    reads_peers: whether a round waits for the peers (a pool of one is then rejected).
    moves_advantages: whether the plan returns its own advantages, computed from one reward per rollout.
    reads_advantages: whether these are computed from the view's advantages, which may come from a preceding regime.
    weighs_groups: whether they include the weight of dropped groups, so that no later regime may change them.
    pools: whether these and its rows form a batch of their own, replacing that of a preceding regime.
    needs: further inputs of the plan: passages for the learner to score, texts for its reward functions.
    prefixes: token ids with which each upcoming rollout begins, () for one without a prefix. They are masked from the
        loss; `Rollout.prefix` is their number.
    same_prompts: whether all policies must see the same prompts in a round.
    late: whether, with these settings, it can use a peer's round after its own round of that number
        (`exchange.staleness`): it plans again with that peer's rollouts, without the prompts that already gave nll
        rows, and the rows and state of that plan are used.
    solution_column: data column that it trains on; `solution` is the task's own, None for no column.
    check: trainer settings that it cannot run with.
    metrics: logged metrics. row_metrics: metrics of the extra rows of an optimizer step.
    level: the paper's level at which experience is shared. control: whether it is a control of another regime.
    acts_when: for a setting that has no effect under others, the other setting and the value or values under which it
        has one.
    variants: values of settings that make an arm an ablation or a control, rather than the regime as published.
    """

    name: str
    summary: str
    plan: Callable[[RoundView, Any], Plan] | None
    settings: type[RegimeSettings] = RegimeSettings
    publishes: Callable[[Any], PublishSchema] = publishes_nothing
    reads_peers: bool = True
    moves_advantages: bool = False
    reads_advantages: bool = False
    weighs_groups: bool = False
    pools: bool = False
    needs: Callable[[RoundView, Any], Needs] = needs_nothing
    prefixes: Callable[[GuideView, Any], list[tuple[int, ...]]] | None = None
    same_prompts: Callable[[Any], bool] = needs_same_prompts
    late: Callable[[Any], bool] = never_late
    solution_column: Callable[[Any], str | None] = learns_no_solutions
    check: Callable[[Any, Mapping[str, Any]], Sequence[Problem]] = no_problems
    metrics: tuple[Metric, ...] = ()
    row_metrics: Callable[[RowStatistics], Mapping[str, float]] = no_row_metrics
    level: Literal["none", "data", "value", "outcome"] = "none"
    control: bool = False
    acts_when: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def describe(self, settings: RegimeSettings) -> str:
        """Return the label for these settings in reports and cards."""
        changed = changed_settings(settings.model_dump(), self.settings().model_dump(), self.acts_when)
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    def ineffective_settings(self, settings: RegimeSettings) -> list[Problem]:
        """Return (key, problem) of the non-default settings that have no effect."""
        values, defaults = flat(settings.model_dump()), flat(self.settings().model_dump())
        problems = []
        for key, (other, value) in self.acts_when.items():
            if values[key] != defaults[key] and not acts(key, values, self.acts_when):
                problem = f"found {values[key]!r}, which has no effect with regime.{other}: {values[other]}"
                effective = " or ".join(map(str, value)) if isinstance(value, tuple | list) else value
                problems.append((key, f"{problem} (only with {effective}); leave it out"))
        return problems

    def staleness_problem(self, settings: RegimeSettings, staleness: int) -> str | None:
        """Return why peers cannot lag by that many rounds, None if they can."""
        if staleness == 0 or self.late(settings):
            return None
        if not self.reads_peers:
            return f"found {staleness}, but regime {self.name!r} does not wait for peers; leave it out"
        return (
            f"found {staleness}, but regime {self.describe(settings)!r} needs the peers' rollouts within the round; "
            "expected 0, or a regime that can use them late (see `mutualrl regimes show NAME`)"
        )

    def whitening_problem(self, *, whiten: bool) -> list[str]:
        """Return why advantages cannot be whitened over the round under this regime; empty if they can."""
        if not whiten or not self.weighs_groups:
            return []
        return [
            f"found true, but regime {self.name!r} sets the advantages of dropped groups to 0 and weighs the others by "
            "their number, which whitening would undo; expected false"
        ]

    def metric(self, role: str) -> str | None:
        """Return the key of the metric with that role, if the regime logs one."""
        return next((metric.key for metric in self.metrics if metric.role == role), None)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings with nested keys written as `outer.inner`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def merged(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with some values replaced, nested ones key by key."""
    result = dict(settings)
    for key, value in own.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if nested else value
    return result


def acts(key: str, values: Mapping[str, Any], acts_when: Mapping[str, tuple[str, Any]]) -> bool:
    """Return whether a setting has an effect among the settings `values`."""
    if key not in acts_when:
        return True
    other, value = acts_when[key]
    return values.get(other) in value if isinstance(value, tuple | list) else bool(values.get(other) == value)


def changed_settings(
    given: Mapping[str, Any], defaults: Mapping[str, Any], acts_when: Mapping[str, tuple[str, Any]]
) -> list[str]:
    """Return `key=value` for every setting that is not the default and has an effect, sorted."""
    flat_defaults, flat_given = flat(defaults), flat(given)
    values = {**flat_defaults, **flat_given}
    return [
        f"{key}={values[key]}"
        for key in sorted(map(str, flat_given))
        if key in flat_defaults and values[key] != flat_defaults[key] and acts(key, values, acts_when)
    ]


def advantage_metrics(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """Return how advantages were changed: `NAME/sign_flips`, the fraction of rollouts whose advantage changed
    between strictly positive and strictly negative, and `NAME/advantage_change`, the mean absolute change."""
    old, new = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not old.size:
        return {}
    return {
        f"{name}/sign_flips": float((np.sign(old) * np.sign(new) < 0).mean()),
        f"{name}/advantage_change": float(np.abs(new - old).mean()),
    }


def advantage_metric_table(name: str) -> tuple[Metric, ...]:
    """Declare the two metrics of `advantage_metrics`."""
    return (
        Metric(f"{name}/sign_flips", "fraction", "own rollouts whose advantage changed sign"),
        Metric(f"{name}/advantage_change", "advantage", "mean absolute change of the advantages", role="action"),
    )
