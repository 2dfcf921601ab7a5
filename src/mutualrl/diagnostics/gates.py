"""Which prompts each model solves, and where SGT's gate opens: arrays over the units of a pool's rollouts.

The gate probability G_n(x) is the paper's Definition "Rescue gate probability".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from mutualrl.diagnostics.rollouts import Bools, Floats, ModelRollouts
from mutualrl.diagnostics.statistics import all_fail
from mutualrl.regimes.regime import SUCCESS_ABOVE

#: below this gate rate a run of 1,000 prompts per round would see fewer than five rescues
SPARSE = 0.005


@dataclass(frozen=True)
class Thresholds:
    """Reward thresholds (paper, Section "Hyperparameters"): the rule of a gate, without margin and limit of uses.

    `gate`: whether all or any of a learner's rollouts must fail; `pick`: how SGT draws a success; `own`: overrides of
    single learners, by name. A learner's gate applies its own thresholds to its peers' rewards, as regime `sgt` does;
    whether a model solves a prompt is by that model's."""

    success_above: float = SUCCESS_ABOVE
    failure_below: float = 0.2
    gate: Literal["all", "any"] = "all"
    pick: Literal["uniform", "shortest"] = "uniform"
    own: Mapping[str, Thresholds] = field(default_factory=dict)
    margin: ClassVar[float] = 0.0
    max_uses_per_prompt: ClassVar[None] = None

    def of(self, learner: str) -> Thresholds:
        """Return the thresholds of one learner."""
        return self.own.get(learner, self)


def successes(rollouts: ModelRollouts, thresholds: Thresholds, which: str) -> Bools:
    """Return whether each model solves each unit, shape (M, P): by its first rollout, or by `any`."""
    limits = np.array([thresholds.of(name).success_above for name in rollouts.policies])
    above: Bools = rollouts.rewards_M_P_G > limits[:, None, None]  # false for NaN
    return np.asarray(above.any(axis=2)) if which == "any" else above[:, :, 0]


def gate_rate(rollouts: ModelRollouts, thresholds: Thresholds, learner: int, k: int) -> Floats:
    """Return G_n(x) = (1 - p_n)^K (1 - prod over peers of (1 - p_m)^K) of every unit, shape (P,).

    Estimated from counts of the learner's failures (below `failure`; with `gate: any`, P(at least one of K)) and of the
    peers' successes (above `success`). A product of estimates over independent rollouts: unbiased for K up to each
    model's number of rollouts; at that number, the observed gate. An unscorable rollout counts as neither."""
    rule = thresholds.of(rollouts.policies[learner])
    rewards, counts = rollouts.rewards_M_P_G, rollouts.present_M_P_G.sum(axis=2)
    failures = (rewards[learner] < rule.failure_below).sum(axis=1)
    if rule.gate == "all":
        failed = all_fail(counts[learner], counts[learner] - failures, k)
    else:
        failed = 1 - all_fail(counts[learner], failures, k)
    peers = np.ones(rewards.shape[1])
    for m in rollouts.peers_of(learner):
        peers = peers * all_fail(counts[m], (rewards[m] > rule.success_above).sum(axis=1), k)
    rate: Floats = failed * (1 - peers)
    return rate


def observed_gate(rollouts: ModelRollouts, thresholds: Thresholds, learner: int) -> Bools:
    """Return SGT's gate on these rollouts, shape (P,): all (or any) of the learner's rewards below `failure`, and some
    peer reward above `success`."""
    rule = thresholds.of(rollouts.policies[learner])
    low = rollouts.rewards_M_P_G[learner] < rule.failure_below
    failed = (low | ~rollouts.present_M_P_G[learner]).all(axis=1) if rule.gate == "all" else low.any(axis=1)
    gate: Bools = failed & (rollouts.peer_rewards(learner) > rule.success_above).any(axis=1)
    return gate
