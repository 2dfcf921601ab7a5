"""Cross-Policy GRPO advantage sharing (XGRPO): own rollouts, with advantages over the whole pool.

Source: paper, Section "Regime 2: Value-level experience sharing" and Section "Hyperparameters" (mix 0.2, length
correction 0.1). The paper states the mixing rule in prose; its convex form is our interpretation:

    A = (1 - mix) * A_local + mix * A_pool
    A *= (mean length of the group / max(1, own length)) ** length_correction
    A  = min(max(A, -advantage_clip), advantage_clip)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

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
from mutualrl.regimes.round import PeerRound, Plan, RoundView
from mutualrl.regimes.spec import Metric, Problem, RegimeSettings, RegimeSpec, advantage_metric_table, advantage_metrics
from mutualrl.seeds import seeded

MARGIN = "xgrpo/variance_margin"


class XGRPOSettings(RegimeSettings):
    """Settings of XGRPO; the defaults of `mix` and `length_correction` are the paper's."""

    mix: float = Field(0.2, ge=0, le=1, description="weight of the pool's advantage in the learner's")
    length_correction: float = Field(0.1, description="strength of the correction for long responses; 0: none")
    advantage_clip: float | None = Field(5.0, gt=0, description="bound on the absolute advantage; null: none")
    scale: Scale | None = Field(None, description="divisor of A_pool; null: trainer.scale_rewards")
    baseline: Baseline = Field("mean", description="baseline of A_pool: the pool's mean, with or without the rollout")
    pool: Literal["matched", "shuffled"] = Field(
        "matched", description="shuffled: control with the peers' rewards assigned to other prompts"
    )


def effective_advantages(local_G: Floats, pooled_G: Floats, lengths_G: Floats, settings: XGRPOSettings) -> Floats:
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


def peer_bags(peers: Mapping[str, PeerRound]) -> dict[str, list[float]]:
    """Return all peers' rewards by prompt, the peers sorted by name."""
    bags: dict[str, list[float]] = {}
    for _, peer in sorted(peers.items()):
        for prompt, rewards in group_by_prompt(peer.column("prompt_id"), peer.column("reward")).items():
            bags.setdefault(prompt, []).extend(rewards)
    return bags


def plan(view: RoundView, settings: RegimeSettings) -> Plan:
    """Return the learner's effective advantages. Only the peers' rewards are read, not their texts."""
    assert isinstance(settings, XGRPOSettings)
    bags: Mapping[str, Sequence[float]] = peer_bags(view.peers)
    if settings.pool == "shuffled":
        bags = shuffled(bags, seeded(view.run_seed, view.round, "shuffled pool", view.learner))
    local = group_by_prompt(view.prompt_ids, view.advantages)
    lengths = group_by_prompt(view.prompt_ids, view.lengths)
    pool = pooled(view.own_groups(), bags, settings.scale or view.scale, settings.baseline)
    if view.whiten:  # as the local advantages are, before the two are mixed
        whitened = whiten(ungroup(view.prompt_ids, pool), view.scored)
        pool = {key: np.array(values) for key, values in group_by_prompt(view.prompt_ids, whitened.tolist()).items()}
    groups = {
        prompt: effective_advantages(np.array(local[prompt]), pool[prompt], np.array(lengths[prompt]), settings)
        for prompt in local
    }
    advantages = ungroup(view.prompt_ids, groups)
    metrics = advantage_metrics("xgrpo", view.advantages, advantages)
    margin = variance_margin(view.own_groups(), bags, lengths)
    return Plan(advantages=advantages, metrics=metrics if margin is None else {**metrics, MARGIN: margin})


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


def check(settings: XGRPOSettings, trainer: Mapping[str, Any]) -> list[Problem]:
    """Return (key, problem) for settings of the pool's advantage that `mix: 0` disables."""
    defaults = XGRPOSettings()
    disabled = [key for key in ("scale", "baseline", "pool") if getattr(settings, key) != getattr(defaults, key)]
    if settings.mix > 0 or not disabled:
        return []
    return [("regime.mix", f"found 0, with which regime.{disabled[0]} has no effect; expected more than 0")]


SPEC = RegimeSpec(
    name="xgrpo",
    summary="own rollouts, with advantages over the rewards of the whole pool",
    settings=XGRPOSettings,
    plan=plan,
    moves_advantages=True,
    reads_advantages=True,
    check=check,
    metrics=(
        *advantage_metric_table("xgrpo"),
        Metric(MARGIN, "reward squared", "above 0 the pooled baseline lowers the variance", "variance margin"),
    ),
    level="value",
    variants={"pool": ("shuffled",)},
)
