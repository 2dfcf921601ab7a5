"""Several regimes combined: `--regime xgrpo+sgt`, or in a recipe `regime: [xgrpo, {name: sgt, weight: 0.05}]`.

Each regime receives the advantages of the one before it, in the given order. Rows are concatenated, metrics merged,
states kept separate. Invalid combinations are rejected with the regimes' names: two regimes that build their own batch,
one of these after a regime whose advantages it would discard, a regime without a plan, the same regime twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import create_model

from mutualrl.errors import RegimeError
from mutualrl.records import PublishSchema
from mutualrl.regimes.round import ExtraRow, GuideView, Needs, Passage, Plan, RoundView, RowStatistics
from mutualrl.regimes.spec import Problem, RegimeSettings, RegimeSpec, needs_nothing

SEPARATOR = "+"


def combined(parts: Sequence[RegimeSpec]) -> RegimeSpec:
    """Return the regime that runs all of `parts`. Raises RegimeError if they cannot be combined."""
    _require_combinable(parts)
    fields: Any = {spec.name: (spec.settings, spec.settings()) for spec in parts}
    settings = create_model("ChannelSettings", __base__=RegimeSettings, **fields)

    def with_settings(settings: Any) -> list[tuple[RegimeSpec, Any]]:
        return [(spec, getattr(settings, spec.name)) for spec in parts]

    def publishes(settings: Any) -> PublishSchema:
        return PublishSchema.union(spec.publishes(chosen) for spec, chosen in with_settings(settings))

    def needs(view: RoundView, settings: Any) -> Needs:
        logprobs: list[Passage] = []
        nll: list[Passage] = []
        rewards: list[tuple[str, str, bool]] = []
        for spec, chosen in with_settings(settings):
            part = spec.needs(_part_view(view, spec), chosen)
            logprobs += part.logprobs
            nll += part.nll
            rewards += part.rewards
        return Needs(tuple(logprobs), tuple(nll), tuple(rewards))

    def plan(view: RoundView, settings: Any) -> Plan:
        return _plan(view, with_settings(settings))

    def check(settings: Any, trainer: Mapping[str, Any]) -> list[Problem]:
        problems: list[Problem] = []
        for spec, chosen in with_settings(settings):
            for key, problem in spec.check(chosen, trainer):
                prefix = f"regime.{spec.name}."
                problems.append((key.replace("regime.", prefix), problem.replace("regime.", prefix)))
        return problems

    def row_metrics(statistics: RowStatistics) -> dict[str, float]:
        merged: dict[str, float] = {}
        for spec in parts:
            merged.update(spec.row_metrics(statistics))
        return merged

    guide = next((spec for spec in parts if spec.prefixes is not None), None)

    def prefixes(view: GuideView, settings: Any) -> list[tuple[int, ...]]:
        assert guide is not None and guide.prefixes is not None
        guide_view = replace(view, state=view.state.get(guide.name, {}))
        return guide.prefixes(guide_view, getattr(settings, guide.name))

    def solution_column(settings: RegimeSettings) -> str | None:
        columns: set[str] = set()
        for spec, chosen in with_settings(settings):
            column = spec.solution_column(chosen)
            if column is not None:
                columns.add(column)
        if len(columns) > 1:
            raise RegimeError(f"regime: its parts train on several columns of the data: {', '.join(sorted(columns))}")
        return columns.pop() if columns else None

    return RegimeSpec(
        name=SEPARATOR.join(spec.name for spec in parts),
        summary="; ".join(spec.summary for spec in parts),
        plan=plan,
        settings=settings,
        publishes=publishes,
        reads_advantages=all(spec.reads_advantages for spec in parts if spec.moves_advantages),
        weighs_groups=any(spec.weighs_groups for spec in parts),
        reads_peers=any(spec.reads_peers for spec in parts),
        moves_advantages=any(spec.moves_advantages for spec in parts),
        pools=any(spec.pools for spec in parts),
        needs=needs if any(spec.needs is not needs_nothing for spec in parts) else needs_nothing,
        prefixes=None if guide is None else prefixes,
        late=lambda settings: all(spec.late(chosen) for spec, chosen in with_settings(settings)),
        same_prompts=lambda settings: all(spec.same_prompts(chosen) for spec, chosen in with_settings(settings)),
        solution_column=solution_column,
        check=check,
        metrics=tuple(metric for spec in parts for metric in spec.metrics),
        row_metrics=row_metrics,
        acts_when={
            f"{spec.name}.{key}": (f"{spec.name}.{other}", value)
            for spec in parts
            for key, (other, value) in spec.acts_when.items()
        },
        variants={f"{spec.name}.{key}": values for spec in parts for key, values in spec.variants.items()},
    )


def _require_combinable(parts: Sequence[RegimeSpec]) -> None:
    names = [spec.name for spec in parts]
    joined = SEPARATOR.join(names)
    if len(set(names)) < len(names):
        raise RegimeError(f"regime {joined!r}: the same regime twice; name each once")
    for spec in parts:
        if spec.plan is None:
            raise RegimeError(f"regime {joined!r}: {spec.name!r} shares nothing; leave it out")
    pooling = [spec.name for spec in parts if spec.pools]
    if len(pooling) > 1:
        raise RegimeError(
            f"regime {joined!r}: {' and '.join(map(repr, pooling))} each build the whole batch; expected one of them"
        )
    before = [spec.name for spec in parts[: names.index(pooling[0])] if spec.moves_advantages] if pooling else []
    if before:
        raise RegimeError(
            f"regime {joined!r}: {pooling[0]!r} would discard the advantages of {before[0]!r}; put it first"
        )
    guides = [spec.name for spec in parts if spec.prefixes is not None]
    if len(guides) > 1:
        raise RegimeError(f"regime {joined!r}: {' and '.join(map(repr, guides))} both prefix the learner's rollouts")
    if guides and pooling:
        raise RegimeError(
            f"regime {joined!r}: {guides[0]!r} prefixes rollouts, and {pooling[0]!r} treats them as sampled in full; "
            "expected one of the two"
        )
    moving = [spec for spec in parts if spec.moves_advantages]
    for first, second in itertools.pairwise(moving):
        if not second.reads_advantages or first.weighs_groups:
            raise RegimeError(
                f"regime {joined!r}: {second.name!r} would discard or change the advantages of {first.name!r}; "
                "expected one of the two"
            )


def _part_view(view: RoundView, spec: RegimeSpec) -> RoundView:
    return replace(view, state=view.state.get(spec.name, {}))


def _plan(view: RoundView, parts: Sequence[tuple[RegimeSpec, Any]]) -> Plan:
    """Merge the parts' plans into one. Answers are split in the order of the parts' needs."""
    advantages: tuple[float, ...] | None = None
    rows: list[ExtraRow] = []
    metrics: dict[str, float] = {}
    states: dict[str, Any] = dict(view.state)
    remaining = view.answers
    current = view
    for spec, settings in parts:
        assert spec.plan is not None
        part_view = _part_view(view, spec)
        answers, remaining = remaining.split(spec.needs(part_view, settings))
        part = spec.plan(replace(current, state=part_view.state, answers=answers), settings)
        if part.advantages is not None:
            advantages = part.advantages
            rollouts = [replace(r, advantage=a) for r, a in zip(view.rollouts, advantages, strict=True)]
            current = replace(current, rollouts=rollouts)
        rows += part.rows
        metrics.update(part.metrics)
        if part.state is not None:
            states[spec.name] = part.state
    return Plan(advantages, tuple(rows), metrics, states if states != dict(view.state) else None)
