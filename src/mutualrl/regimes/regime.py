"""`Regime`: a rule by which policies share experience, as a class whose fields are its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mutualrl.records import PublishSchema
from mutualrl.regimes.advantages import group_by_prompt
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.round import GuideView, Plan, Requests, RoundView, RowStatistics
from mutualrl.storage.metrics import Metric
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from mutualrl.rollouts import Rollouts

#: (key of the trainer's settings, problem)
Problem = tuple[str, str]
#: values of settings by name, a trainer's or a regime's
Settings = Mapping[str, Any]
#: by setting, the other setting and the value or values under which it has an effect
Conditions = Mapping[str, tuple[str, object]]
#: by setting, the values that make an arm an ablation or a control
Variants = Mapping[str, tuple[object, ...]]

#: traits of a source that has texts and rewards only, of some prompts
SELECTION = SourceTraits()
#: default reward above which a rollout is a success (paper, "Hyperparameters")
SUCCESS_ABOVE = 0.8


def setting(
    default: object,
    description: str,
    *,
    acts_with: Mapping[str, object] | None = None,
    variants: Sequence[object] = (),
    **constraints: float,
) -> Any:  # as pydantic's Field
    """Declare a setting of a regime.

    `acts_with`: another setting and the value, or tuple of values, under which this one has an effect; by default it
    always has one. `variants`: values that make an arm an ablation or a control, rather than the regime as published.
    `constraints`: pydantic's, such as `ge`.
    """
    extra = {"acts_with": dict(acts_with or {}), "variants": list(variants)}
    return Field(default, description=description, json_schema_extra=extra, **constraints)  # type: ignore[call-overload]


class Regime(BaseModel):
    """Rule by which policies share experience. Its fields are its settings: keys under `regime:` in a recipe.

    A subclass sets `name` and `summary`, and overrides `plan`, and `needs` if it reads more than rewards. All
    methods are pure: what a regime remembers is in `Plan.state`.

    metrics: the numbers that it logs.
    default_pool: the shipped pool that shows what it does, where none is named.
    level: the paper's level at which experience is shared. control: whether it is a control of another regime.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    default_pool: ClassVar[str] = "tiny"
    level: ClassVar[Literal["none", "data", "value", "outcome"]] = "none"
    control: ClassVar[bool] = False

    @property
    def regimes(self) -> list[Regime]:
        """Return the regimes that it is made of: itself."""
        return [self]

    # ---- a round

    def needs(self) -> Needs:
        """Return what it reads, does and needs in a run, with these settings."""
        return Needs()

    def requests(self, view: RoundView) -> Requests:
        """Return what the plan needs beyond the exchange's data. Called again with the results in `view.results`, until
        it asks for nothing new."""
        return Requests()

    def plan(self, view: RoundView) -> Plan:
        """Return additions to the learner's update."""
        return Plan()

    def prefixes(self, view: GuideView) -> list[tuple[int, ...]]:
        """Return token ids with which each upcoming rollout begins, () for one without a prefix. They are masked from
        the loss; `Rollout.prefix` is their number."""
        return [()] * len(view.prompt_ids)

    def replays(self, view: GuideView) -> list[Trajectory | None]:
        """Return, in a task with tools, the turns that each upcoming rollout begins with, ending with results; None for
        one without. Its tools are called again. `Rollout.prefix` is their number of tokens."""
        return [None] * len(view.prompt_ids)

    def row_metrics(self, statistics: RowStatistics) -> Mapping[str, float]:
        """Return metrics of the extra rows of an optimizer step."""
        return {}

    # ---- what it needs of a run

    def source_problem(self, traits: SourceTraits = SELECTION) -> str | None:
        """Return why it cannot use a source that has this besides texts and rewards; None if it can."""
        needs = self.needs()
        if "logprobs" in needs.reads.fields and not traits.logprobs:
            problem = "needs the log-probs of every rollout that it reads, which this source does not have"
            other = "a source frozen:MODEL"
        elif not needs.selections and not traits.every_prompt:
            problem = "pools statistics of what policies sample; a source's texts are a selection and would bias them"
            other = "a served or frozen source with ask: all"
        else:
            return None
        return f"regime {self.name!r} {problem}; expected {other}"

    def turns_problems(self, *, turns: bool) -> list[Problem]:
        """Return (key, problem) of its settings, with key `regime.KEY`, that do not suit a task whose rollouts have
        several turns, with tools or an environment, or one whose rollouts have one."""
        return []

    def unsolved(self, rollouts: Rollouts) -> list[str]:
        """Return the prompts, sorted, on which this policy wants a text of a source with `ask: gated`, from its own
        rollouts of a round: those on which each scored one failed."""
        rewards = group_by_prompt(rollouts.prompt_ids, rollouts.rewards)
        scored = {key: [reward for reward in group if not math.isnan(reward)] for key, group in rewards.items()}
        limit = success_above(self)
        return [key for key, group in sorted(scored.items()) if group and max(group) <= limit]

    def problems(self, trainer: Settings) -> Sequence[Problem]:
        """Return (key, problem) of the trainer's settings with which it cannot run."""
        return ()

    # ---- read from the class

    @classmethod
    def requests_anything(cls) -> bool:
        """Return whether the class makes requests."""
        return cls.requests is not Regime.requests

    @classmethod
    def acts_with(cls) -> Conditions:
        """Return, for each setting that has no effect under others, the other setting and the value or values under
        which it has one."""
        conditions: dict[str, tuple[str, object]] = {}
        for key, field in cls.model_fields.items():
            extra = field.json_schema_extra
            condition = extra.get("acts_with") if isinstance(extra, dict) else None
            if isinstance(condition, dict) and condition:
                conditions[key] = next(iter(condition.items()))
        return conditions

    @classmethod
    def variants(cls) -> Variants:
        """Return, by setting, the values that make an arm an ablation or a control."""
        values: dict[str, tuple[object, ...]] = {}
        for key, field in cls.model_fields.items():
            extra = field.json_schema_extra
            variants = extra.get("variants") if isinstance(extra, dict) else None
            if isinstance(variants, list) and variants:
                values[key] = tuple(variants)
        return values

    @classmethod
    def metric(cls, role: str) -> str | None:
        """Return the key of the metric with that role, if the regime logs one."""
        return next((metric.key for metric in cls.metrics if metric.role == role), None)

    # ---- settings, as words

    def describe(self) -> str:
        """Return the label of these settings in reports and cards."""
        changed = changed_settings(self.model_dump(), type(self)().model_dump(), self.acts_with())
        return f"{self.name} ({', '.join(changed)})" if changed else self.name

    def ineffective_settings(self) -> list[Problem]:
        """Return (key, problem) of the non-default settings that have no effect."""
        values, defaults = flat(self.model_dump()), flat(type(self)().model_dump())
        problems = []
        for key, (other, value) in self.acts_with().items():
            if values[key] != defaults[key] and not acts(key, values, self.acts_with()):
                problem = f"found {values[key]!r}, which has no effect with regime.{other}: {values[other]}"
                effective = " or ".join(map(str, value)) if isinstance(value, tuple | list) else value
                problems.append((key, f"{problem} (only with {effective}); leave it out"))
        return problems


def no_turns_problems(turns: int | None) -> list[Problem]:
    """Return the problem of a regime's setting `turns` in a task without any."""
    if turns is None:
        return []
    return [("regime.turns", f"found {turns}, of a run with tools, of which the task has none; leave it out")]


def success_above(regime: Regime) -> float:
    """Return the reward above which a rollout is a success under a regime, the smallest of its parts'; 0 if no setting
    that has an effect says so."""
    values, conditions = flat(regime.model_dump()), regime.acts_with()
    keys = [key for key in values if key.rpartition(".")[2] == "success_above" and acts(key, values, conditions)]
    return float(min((values[key] for key in keys), default=0.0))


def publish_schema(regimes: Sequence[Regime], publish: str = "regime") -> PublishSchema | None:
    """Return the fields that a policy publishes: those that the regime of any policy of the pool reads, or all
    (`publish: full`); None if no policy reads any."""
    needs = [regime.needs() for regime in regimes]
    schema = PublishSchema.union(each.reads for each in needs)
    if publish == "full":
        return schema.complete()
    return schema if any(each.peers for each in needs) else None


def flat(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Return settings with nested keys written as `outer.inner`."""
    values: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def merged(settings: Settings, own: Settings) -> dict[str, Any]:
    """Return settings with some values replaced, nested ones key by key."""
    result = dict(settings)
    for key, value in own.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if nested else value
    return result


def acts(key: str, values: Settings, acts_with: Conditions) -> bool:
    """Return whether a setting has an effect among the settings `values`."""
    if key not in acts_with:
        return True
    other, value = acts_with[key]
    return values.get(other) in value if isinstance(value, tuple | list) else bool(values.get(other) == value)


def changed_settings(given: Settings, defaults: Settings, acts_with: Conditions) -> list[str]:
    """Return `key=value` for every setting that is not the default and has an effect, sorted."""
    flat_defaults, flat_given = flat(defaults), flat(given)
    values = {**flat_defaults, **flat_given}
    return [
        f"{key}={values[key]}"
        for key in sorted(map(str, flat_given))
        if key in flat_defaults and values[key] != flat_defaults[key] and acts(key, values, acts_with)
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
