"""Do the pooled rewards carry structure? Pooled normalization with the true pool against a shuffled one.

Source: paper, Appendix "Pooled normalization vs. shuffled-pool control", Table "Pooled normalization carries structured
cross-policy reward information". The pure pooled rule (mix 1, no length correction) is compared with the local one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import name, number, table
from mutualrl.diagnostics.diagnostic import INLINE, Diagnostic, Figures, Inputs, Scope
from mutualrl.diagnostics.drawing import legend, short
from mutualrl.diagnostics.request import DiagnosticRequest
from mutualrl.diagnostics.rollouts import Bools, Floats, Ints, ModelRollouts
from mutualrl.diagnostics.scales import Scales
from mutualrl.diagnostics.statistics import pearson, pooled_advantages, ratio, row_standard_deviations
from mutualrl.regimes.advantages import standard_deviation
from mutualrl.regimes.xgrpo import XGRPO
from mutualrl.seeds import seeded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POOLS = ("true", "shuffled")


@dataclass(frozen=True, slots=True)
class PoolMeasures:
    """Five measures of a pool of rewards; `advantage_change`: the mean over prompts of |A_pool - A_local|.

    `correlation`: over prompts, of that change with the peers' reward spread (of the same prompt, even under the
    shuffled pool). `sign_flips`: fraction of rollouts whose advantage goes between strictly positive and strictly
    negative: 0 for 0/1 rewards, since both advantages of a success are at least 0 and both of a failure at most 0.
    `sign_changes`: the same with 0 as a third sign. `signed_change`: the mean of A_pool - A_local."""

    correlation: float
    sign_flips: float
    sign_changes: float
    advantage_change: float
    signed_change: float


@dataclass(frozen=True, slots=True)
class Pools:
    """Measures under the true and the shuffled pool."""

    true: PoolMeasures
    shuffled: PoolMeasures


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A learner's measures."""

    learner: str
    pools: Pools = field(metadata=INLINE)


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """Result. `scale`: divisors of the advantages; `mean`: over the learners."""

    scale: str
    rows: list[ValueRow]
    mean: Pools


def compute(inputs: Inputs[DiagnosticRequest]) -> ValueCheck:
    """Return the result."""
    return xgrpo_check(inputs.rollouts, inputs.plan.scales, inputs.plan.seed)


def xgrpo_check(rollouts: ModelRollouts, scales: Scales, seed: int) -> ValueCheck:
    """Return the measures of every learner under its peers' rewards, true and shuffled."""
    rows = []
    for learner, policy in enumerate(rollouts.policies):
        peers = rollouts.peer_rewards(learner)
        shuffled = peers[shuffle(rollouts, policy, seed)]
        pools = Pools(_measured(rollouts, learner, peers, scales), _measured(rollouts, learner, shuffled, scales))
        rows.append(ValueRow(policy, pools))
    mean = Pools(_mean([row.pools.true for row in rows]), _mean([row.pools.shuffled for row in rows]))
    return ValueCheck(scales.described(), rows, mean)


def _mean(measures: Sequence[PoolMeasures]) -> PoolMeasures:
    """Return the mean of each measure."""
    keys = [entry.name for entry in fields(PoolMeasures)]
    return PoolMeasures(**{key: float(np.mean([getattr(each, key) for each in measures])) for key in keys})


def shuffle(rollouts: ModelRollouts, learner: str, seed: int) -> Ints:
    """Return, by unit, the unit whose peer rewards it gets: a permutation within each round, as drawn by regime `xgrpo`
    with `pool: shuffled`."""
    order = np.arange(len(rollouts.prompt_ids))
    for round_index in np.unique(rollouts.rounds):
        units = np.flatnonzero(rollouts.rounds == round_index)
        ranked = np.array(sorted(units, key=lambda p: rollouts.prompt_ids[p]))
        drawn = seeded(seed, int(round_index), "shuffled pool", learner).permutation(len(ranked))
        order[ranked] = ranked[drawn]
    return order


def advantages(rollouts: ModelRollouts, learner: int, peers_P_H: Floats, scales: Scales) -> tuple[Floats, Floats]:
    """Return A_local and A_pool of the learner's rollouts, shape (P, G) each; 0 where there is no rollout. With
    scale `batch` a round is a batch."""
    rewards = rollouts.rewards_M_P_G[learner]
    pool = np.concatenate([rewards, peers_P_H], axis=1)
    local, pooled = scales.of(rollouts.policies[learner])
    return (
        pooled_advantages(rewards, rewards, scale=local, batch_standard_deviation=_by_round(rollouts, rewards, local)),
        pooled_advantages(rewards, pool, scale=pooled, batch_standard_deviation=_by_round(rollouts, pool, pooled)),
    )


def _by_round(rollouts: ModelRollouts, values_P_H: Floats, scale: str) -> Floats:
    """Return the standard deviation of each unit's round, shape (P, 1)."""
    by_unit = np.full((len(values_P_H), 1), np.nan)
    if scale == "batch":
        for round_index in np.unique(rollouts.rounds):
            units = rollouts.rounds == round_index
            by_unit[units] = standard_deviation(values_P_H[units].ravel())
    return by_unit


def _measured(rollouts: ModelRollouts, learner: int, peers_P_H: Floats, scales: Scales) -> PoolMeasures:
    """Return the measures of a pool of peers' rewards."""
    local, pooled = advantages(rollouts, learner, peers_P_H, scales)
    present: Bools = rollouts.present_M_P_G[learner]
    count = present.sum(axis=1)
    change = np.where(present, pooled - local, 0.0)
    size = np.abs(change).sum(axis=1) / count
    return PoolMeasures(
        correlation=pearson(row_standard_deviations(rollouts.peer_rewards(learner)), size),
        sign_flips=float(ratio((np.sign(local) * np.sign(pooled) < 0)[present].sum(), present.sum())),
        sign_changes=float(ratio((np.sign(local) != np.sign(pooled))[present].sum(), present.sum())),
        advantage_change=float(size.mean()),
        signed_change=float((change.sum(axis=1) / count).mean()),
    )


def markdown(result: ValueCheck, scope: Scope) -> str:
    """Return the table of the true against the shuffled pool."""
    head = [
        "learner",
        "pool",
        "corr. peer spread ↔ adv. change",
        "adv. sign-flip rate",
        "adv. sign-change rate, 0 counted",
        "mean abs. adv. change",
        "mean signed change",
    ]
    keys = [entry.name for entry in fields(PoolMeasures)]
    rows = []
    for learner, pools in [*((row.learner, row.pools) for row in result.rows), ("mean", result.mean)]:
        for pool in POOLS:
            rows.append([name(learner), pool, *(number(getattr(getattr(pools, pool), key)) for key in keys)])
    title = f"Pooled normalization vs. shuffled pool ({scope.described()}; scale: {result.scale})"
    return table(title, head, rows)


def figures(result: ValueCheck) -> Figures:
    """Return three measures under the true and the shuffled pool."""

    def draw(figure: Figure) -> None:
        """Draw a panel per measure."""
        measures = (
            ("correlation", "corr. of peer spread and change"),
            ("sign_changes", "sign changes, 0 counted"),
            ("advantage_change", "mean |change|"),
        )
        for axis, (key, title) in zip(figure.subplots(1, 3), measures, strict=True):
            positions = np.arange(len(result.rows))
            for offset, pool in ((-0.2, "true"), (0.2, "shuffled")):
                values = [getattr(getattr(row.pools, pool), key) for row in result.rows]
                axis.bar(positions + offset, values, 0.4, label=f"{pool} pool")
            axis.axhline(0, color="black", linewidth=0.6)
            axis.set_xticks(positions, [short(row.learner) for row in result.rows], fontsize=8, parse_math=False)
            axis.set_title(title, fontsize=10)
        legend(axis, fontsize=8)

    return {XGRPO.name: ((11, 3.6), draw)}


DIAGNOSTIC = Diagnostic(DiagnosticRequest, compute, markdown, figures)
