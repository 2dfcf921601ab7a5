"""XGRPO check: whether pooled rewards carry structure; the true pool against a shuffled one, on the same rollouts.

Source: paper, Appendix "Pooled normalization vs. shuffled-pool control", Table "Pooled normalization carries structured
cross-policy reward information". The pure pooled rule (mix 1, no length correction) is compared with the local one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from mutualrl.diagnostics.results import PoolMeasures, ValueCheck, ValueRow
from mutualrl.diagnostics.rollouts import Bools, Floats, Ints, Rollouts
from mutualrl.diagnostics.statistics import pearson, pooled_advantages, ratio, row_standard_deviations
from mutualrl.regimes.advantages import standard_deviation
from mutualrl.seeds import seeded

POOLS = ("true", "shuffled")


@dataclass(frozen=True)
class Scales:
    """Divisors of the advantages: `group`, `batch` or `none`; `own`: (local, pooled) of single policies, by name."""

    default: str = "group"
    own: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[str, str]:
        """Return the divisors of a policy's local and pooled rules."""
        return self.own.get(policy, (self.default, self.default))

    def described(self) -> str:
        """Return the divisors in use as text."""
        scales = sorted({scale for pair in self.own.values() for scale in pair} or {self.default})
        return ", ".join(scales)


def xgrpo_check(rollouts: Rollouts, scales: Scales, seed: int) -> ValueCheck:
    """Return `{"policies", "prompts", "scale", "rows": [{"learner", "true", "shuffled"}], "mean"}`; each pool has
    `correlation`, `sign_flips`, `sign_changes`, `advantage_change` and `signed_change`."""
    rows: list[ValueRow] = []
    for learner, name in enumerate(rollouts.policies):
        peers = rollouts.peer_rewards(learner)
        shuffled = peers[shuffle(rollouts, name, seed)]
        rows.append(
            {
                "learner": name,
                "true": _measured(rollouts, learner, peers, scales),
                "shuffled": _measured(rollouts, learner, shuffled, scales),
            }
        )
    mean = {"true": _mean([row["true"] for row in rows]), "shuffled": _mean([row["shuffled"] for row in rows])}
    return {
        "policies": list(rollouts.policies),
        "prompts": len(rollouts.prompt_ids),
        "scale": scales.described(),
        "rows": rows,
        "mean": mean,
    }


def _mean(measures: Sequence[PoolMeasures]) -> dict[str, float]:
    """Return the mean of each measure."""
    columns: dict[str, list[float]] = {}
    for pool in measures:
        for key, value in pool.items():
            columns.setdefault(key, []).append(cast(float, value))
    return {key: float(np.mean(values)) for key, values in columns.items()}


def shuffle(rollouts: Rollouts, learner: str, seed: int) -> Ints:
    """Return, by unit, the unit whose peer rewards it gets: a permutation within each round, as drawn by regime `xgrpo`
    with `pool: shuffled`."""
    order = np.arange(len(rollouts.prompt_ids))
    for round_index in np.unique(rollouts.rounds):
        units = np.flatnonzero(rollouts.rounds == round_index)
        ranked = np.array(sorted(units, key=lambda p: rollouts.prompt_ids[p]))
        drawn = seeded(seed, int(round_index), "shuffled pool", learner).permutation(len(ranked))
        order[ranked] = ranked[drawn]
    return order


def advantages(rollouts: Rollouts, learner: int, peers_P_H: Floats, scales: Scales) -> tuple[Floats, Floats]:
    """Return A_local and A_pool of the learner's rollouts, shape (P, G) each; 0 where there is no rollout. With
    scale `batch` a round is a batch."""
    rewards = rollouts.rewards_M_P_G[learner]
    pool = np.concatenate([rewards, peers_P_H], axis=1)
    local, pooled = scales.of(rollouts.policies[learner])
    return (
        pooled_advantages(rewards, rewards, scale=local, batch_standard_deviation=_by_round(rollouts, rewards, local)),
        pooled_advantages(rewards, pool, scale=pooled, batch_standard_deviation=_by_round(rollouts, pool, pooled)),
    )


def _by_round(rollouts: Rollouts, values_P_H: Floats, scale: str) -> Floats:
    """Return the standard deviation of each unit's round, shape (P, 1)."""
    by_unit = np.full((len(values_P_H), 1), np.nan)
    if scale == "batch":
        for round_index in np.unique(rollouts.rounds):
            units = rollouts.rounds == round_index
            by_unit[units] = standard_deviation(values_P_H[units].ravel())
    return by_unit


def _measured(rollouts: Rollouts, learner: int, peers_P_H: Floats, scales: Scales) -> PoolMeasures:
    """Return five measures of a pool; `advantage_change`: the mean over prompts of |A_pool - A_local|.

    `correlation`: over prompts, of that change with the peers' reward spread (of the same prompt, even under the
    shuffled pool). `sign_flips`: fraction of rollouts whose advantage goes between strictly positive and strictly
    negative: 0 for 0/1 rewards, since both advantages of a success are at least 0 and both of a failure at most 0.
    `sign_changes`: the same with 0 as a third sign. `signed_change`: the mean of A_pool - A_local."""
    local, pooled = advantages(rollouts, learner, peers_P_H, scales)
    present: Bools = rollouts.present_M_P_G[learner]
    count = present.sum(axis=1)
    change = np.where(present, pooled - local, 0.0)
    size = np.abs(change).sum(axis=1) / count
    return {
        "correlation": pearson(row_standard_deviations(rollouts.peer_rewards(learner)), size),
        "sign_flips": float(ratio((np.sign(local) * np.sign(pooled) < 0)[present].sum(), present.sum())),
        "sign_changes": float(ratio((np.sign(local) != np.sign(pooled))[present].sum(), present.sum())),
        "advantage_change": float(size.mean()),
        "signed_change": float((change.sum(axis=1) / count).mean()),
    }
