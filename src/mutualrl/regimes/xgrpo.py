"""Cross-Policy GRPO advantage sharing (XGRPO): own rollouts, with advantages over the whole pool.

Source: paper, Section "Regime 2: Value-level experience sharing" and Section "Hyperparameters" (mix 0.2, length
correction 0.1). The paper states the mixing rule in prose; its convex form is our interpretation:

    A = (1 - mix) * A_local + mix * A_pool
    A *= (mean length of the group / max(1, own length)) ** length_correction
    A  = min(max(A, -advantage_clip), advantage_clip)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from mutualrl.regimes.advantages import (
    Baseline,
    Floats,
    Scale,
    group_by_prompt,
    pool_advantages,
    standard_deviation,
    ungroup,
    whiten,
)
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.peers import peer_rewards
from mutualrl.regimes.regime import Problem, Regime, Settings, advantage_metric_table, advantage_metrics, setting
from mutualrl.regimes.round import Plan, RoundView
from mutualrl.seeds import seeded
from mutualrl.storage.metrics import Metric

MARGIN = "xgrpo/variance_margin"


class XGRPO(Regime):
    """XGRPO; the defaults of `mix` and `length_correction` are the paper's."""

    name = "xgrpo"
    summary = "own rollouts, with advantages over the rewards of the whole pool"
    level = "value"
    metrics = (
        *advantage_metric_table("xgrpo"),
        Metric(MARGIN, "reward squared", "above 0 the pooled baseline lowers the variance", "variance margin"),
    )

    mix: float = setting(0.2, "weight of the pool's advantage in the learner's", ge=0, le=1)
    length_correction: float = setting(0.1, "strength of the correction for long responses; 0: none")
    advantage_clip: float | None = setting(5.0, "bound on the absolute advantage; null: none", gt=0)
    scale: Scale | None = setting(None, "divisor of A_pool; null: trainer.scale_rewards")
    baseline: Baseline = setting("mean", "baseline of A_pool: the pool's mean, with or without the rollout")
    pool: Literal["matched", "shuffled"] = setting(
        "matched",
        "shuffled: control with the peers' rewards assigned to other prompts",
        variants=("shuffled",),
    )

    def needs(self) -> Needs:
        """Return that it adjusts advantages."""
        return Needs(advantages="adjusts")

    def plan(self, view: RoundView) -> Plan:
        """Return the learner's effective advantages. Only the peers' rewards are read, not their texts."""
        bags: Mapping[str, Sequence[float]] = peer_rewards(view)
        if self.pool == "shuffled":
            bags = shuffled(bags, seeded(view.run_seed, view.round, "shuffled pool", view.learner))
        local = group_by_prompt(view.prompt_ids, view.advantages)
        lengths = group_by_prompt(view.prompt_ids, view.lengths)
        pool = pooled(view.own_groups(), bags, self.scale or view.scale, self.baseline)
        if view.whiten:  # as the local advantages are, before the two are mixed
            whitened = whiten(ungroup(view.prompt_ids, pool), view.scored)
            groups_of = group_by_prompt(view.prompt_ids, whitened.tolist())
            pool = {prompt_id: np.array(values) for prompt_id, values in groups_of.items()}
        groups = {}
        for prompt_id, values in local.items():
            lengths_G = np.array(lengths[prompt_id])
            groups[prompt_id] = effective_advantages(np.array(values), pool[prompt_id], lengths_G, self)
        advantages = ungroup(view.prompt_ids, groups)
        metrics = advantage_metrics("xgrpo", view.advantages, advantages)
        margin = variance_margin(view.own_groups(), bags, lengths)
        return Plan(advantages=advantages, metrics=metrics if margin is None else {**metrics, MARGIN: margin})

    def problems(self, trainer: Settings) -> list[Problem]:
        """Return (key, problem) for settings of the pool's advantage that `mix: 0` disables."""
        defaults = XGRPO()
        disabled = [key for key in ("scale", "baseline", "pool") if getattr(self, key) != getattr(defaults, key)]
        if self.mix > 0 or not disabled:
            return []
        return [("regime.mix", f"found 0, with which regime.{disabled[0]} has no effect; expected more than 0")]


def effective_advantages(local_G: Floats, pooled_G: Floats, lengths_G: Floats, settings: XGRPO) -> Floats:
    """Apply the module's three formulas to the rollouts of one prompt; all of shape (G,), lengths in tokens."""
    advantages = (1.0 - settings.mix) * local_G + settings.mix * pooled_G
    advantages = advantages * (lengths_G.mean() / np.maximum(1.0, lengths_G)) ** settings.length_correction
    bound = np.inf if settings.advantage_clip is None else settings.advantage_clip
    clipped: Floats = np.clip(advantages, -bound, bound)
    return clipped


def shuffled(bags: Mapping[str, Sequence[float]], rng: np.random.Generator) -> dict[str, Sequence[float]]:
    """Return the bags of rewards, assigned to the prompts in random order (paper, Section "Pooled normalization vs.
    shuffled-pool control")."""
    prompts = sorted(bags)
    order = rng.permutation(len(prompts))
    return {prompt: bags[prompts[i]] for prompt, i in zip(prompts, order, strict=True)}


def pooled(
    own: Mapping[str, Sequence[float]], peers: Mapping[str, Sequence[float]], scale: Scale, baseline: Baseline
) -> dict[str, Floats]:
    """Return A_pool of the learner's rollouts by prompt: normalised with the statistics of all policies' rewards on
    it."""
    pools = {prompt: [*rewards, *peers.get(prompt, ())] for prompt, rewards in own.items()}
    batch_std = standard_deviation([reward for pool in pools.values() for reward in pool])
    return {
        prompt: pool_advantages(
            rewards, pools[prompt], scale=scale, batch_standard_deviation=batch_std, baseline=baseline
        )
        for prompt, rewards in own.items()
    }


def variance_margin(
    own: Mapping[str, Sequence[float]],
    peers: Mapping[str, Sequence[float]],
    lengths: Mapping[str, Sequence[float]],
) -> float | None:
    """Return an estimate of E[H D Delta] - E[H Delta^2] / 2 over E[H]: above 0 the pooled baseline lowers the variance
    of the gradient, below 0 it raises it (paper, Theorem "When pooled XGRPO normalization reduces variance").

    With baselines that leave rollout i out, the difference is the mean of |s_i|^2 ((r_i - b_n)^2 - (r_i - b_pool)^2)
    / 2. The squared norm of a response's score is assumed to be proportional to its length (uncorrelated token
    scores). None without a group of two scored rollouts and a peer's.
    """
    weighted = total = 0.0
    for prompt, rewards in own.items():
        others = [reward for reward in peers.get(prompt, ()) if not np.isnan(reward)]
        scored = [(r, n) for r, n in zip(rewards, lengths[prompt], strict=True) if not np.isnan(r)]
        if len(scored) < 2 or not others:
            continue
        own_sum, pool_sum = sum(r for r, _ in scored), sum(r for r, _ in scored) + sum(others)
        for reward, length in scored:
            local = (own_sum - reward) / (len(scored) - 1)
            pool = (pool_sum - reward) / (len(scored) - 1 + len(others))
            weighted += length * ((reward - local) ** 2 - (reward - pool) ** 2) / 2
            total += length
    return weighted / total if total else None
