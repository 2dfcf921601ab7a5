"""Does the pool of rewards carry structure? The true pool against a shuffled one, on the same rollouts.

Source: paper, Appendix "Pooled normalization vs. shuffled-pool control", Table "Pooled normalization carries structured
cross-policy reward information". The pure pooled rule (mix 1, no length correction) is held against the local one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mutualrl.diagnostics.rollouts import Bools, Floats, Ints, Rollouts
from mutualrl.diagnostics.statistics import pearson, pooled_advantages, ratio, spread
from mutualrl.regimes.advantages import deviation
from mutualrl.regimes.base import seeded

POOLS = ("true", "shuffled")


def xgrpo_check(rollouts: Rollouts, scale: str, seed: int) -> dict[str, Any]:
    """`{"policies", "prompts", "scale", "rows": [{"learner", "true", "shuffled"}], "mean"}`; each pool has
    `correlation`, `sign_flips`, `sign_changes`, `advantage_change` and `signed_change`."""
    rows: list[dict[str, Any]] = []
    for learner, name in enumerate(rollouts.policies):
        peers = rollouts.peer_rewards(learner)
        dealt = {"true": peers, "shuffled": peers[shuffle(rollouts, name, seed)]}
        rows.append(
            {"learner": name} | {pool: _measured(rollouts, learner, bags, scale) for pool, bags in dealt.items()}
        )
    mean = {pool: {key: float(np.mean([row[pool][key] for row in rows])) for key in rows[0][pool]} for pool in POOLS}
    return {
        "policies": list(rollouts.policies),
        "prompts": len(rollouts.prompt_ids),
        "scale": scale,
        "rows": rows,
        "mean": mean,
    }


def shuffle(rollouts: Rollouts, learner: str, seed: int) -> Ints:
    """Which unit's peer rewards each unit gets: a permutation within every round, the one that regime `xgrpo` with
    `pool: shuffled` draws in that round."""
    order = np.arange(len(rollouts.prompt_ids))
    for round_ in np.unique(rollouts.rounds):
        units = np.flatnonzero(rollouts.rounds == round_)
        ranked = np.array(sorted(units, key=lambda p: rollouts.prompt_ids[p]))
        drawn = seeded(seed, int(round_), "shuffled pool", learner).permutation(len(ranked))
        order[ranked] = ranked[drawn]
    return order


def advantages(rollouts: Rollouts, learner: int, peers_P_H: Floats, scale: str) -> tuple[Floats, Floats]:
    """A_local and A_pool of the learner's rollouts, shape (P, G) each; 0 where there is no rollout."""
    own = rollouts.rewards_M_P_G[learner]
    pool = np.concatenate([own, peers_P_H], axis=1)
    local = pooled_advantages(own, own, scale=scale, batch_deviation=deviation(own.ravel()))
    pooled = pooled_advantages(own, pool, scale=scale, batch_deviation=deviation(pool.ravel()))
    return local, pooled


def _measured(rollouts: Rollouts, learner: int, peers_P_H: Floats, scale: str) -> dict[str, float]:
    """Five measures of a pool, `advantage_change` being the mean over prompts of |A_pool - A_local|.

    `correlation`: over prompts, of that change with the peers' reward spread (their own prompt's, also under the
    shuffled pool). `sign_flips`: share of rollouts whose advantage goes between strictly positive and strictly
    negative: none where rewards are 0 or 1, since both advantages of a success are at least 0 and both of a failure at
    most 0. `sign_changes`: the same with 0 as a sign of its own. `signed_change`: the mean of A_pool - A_local."""
    local, pooled = advantages(rollouts, learner, peers_P_H, scale)
    present: Bools = rollouts.present_M_P_G[learner]
    count = present.sum(axis=1)
    change = np.where(present, pooled - local, 0.0)
    size = np.abs(change).sum(axis=1) / count
    return {
        "correlation": pearson(spread(rollouts.peer_rewards(learner)), size),
        "sign_flips": float(ratio((local * pooled < 0)[present].sum(), present.sum())),
        "sign_changes": float(ratio((np.sign(local) != np.sign(pooled))[present].sum(), present.sum())),
        "advantage_change": float(size.mean()),
        "signed_change": float((change.sum(axis=1) / count).mean()),
    }
