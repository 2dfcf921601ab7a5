"""HACPO: own and peers' rollouts as one batch, weighted by each policy's capability.

Source: arXiv 2603.02604 (Heterogeneous Agent Collaborative Policy Optimization). P_k is the capability of policy k:
the mean over its last `window` rounds of the fraction of rewards above 0. For learner k and a rollout of policy j

    w = P_k / P_j                                            (1 during `warmup_rounds`)
    b = mean over the pooled rollouts of a prompt of r * w   (plain, if all rewards are equal)
    A = (r - b) / (standard deviation of the pooled rewards + 1e-6)

These are equations 5 and 6 of the paper (`baseline: paper`). The released code (`baseline: released`) clamps w to
[ratio_low, ratio_high], and uses the learner's own mean where b would exceed 1.

A peer's row has the sequence ratio s = exp(mean log p_learner - mean log p_source), each mean over that policy's
tokens, and the objective c * detach(c)^alpha * A / clamp(w) with c = clamp(s, 1 - clip_low + clip_step * m, 1), m =
index of the optimizer step in the round. Own rows have GSPO's clip: TRL's with `importance_sampling_level: sequence`.
The loss is minus the mean over all rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import model_validator

from mutualrl.records import PublishSchema
from mutualrl.regimes.advantages import Floats, group_by_prompt, standard_deviation, success_rate, ungroup
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.peers import encoded, peer_rollouts
from mutualrl.regimes.regime import Problem, Regime, Settings, setting
from mutualrl.regimes.round import ExtraRow, Plan, RoundView, RowSource, RowStatistics, Stepwise
from mutualrl.storage.metrics import Metric

logger = logging.getLogger(__name__)

FLOOR = 1e-8  # capability of a policy that never succeeds
EPSILON = 1e-6  # added to the standard deviation


class HACPO(Regime):
    """HACPO: defaults from the released code, except the paper's baseline."""

    name = "hacpo"
    summary = "own and peers' rollouts as one batch, weighted by each policy's capability (HACPO)"
    metrics = (
        Metric("hacpo/rows", "rows", "peer rows that joined the batch", role="action"),
        Metric("hacpo/unencodable", "rows", "peer rows that the learner cannot encode, or that were not scored"),
        Metric("hacpo/capability", "fraction", "mean success rate over the last rounds", "capability"),
        Metric("hacpo/advantage_max", "advantage", "largest absolute own advantage"),
        Metric("hacpo/weight", "ratio", "mean weight of the peer rows, 1 / w", "weight of peer rows"),
        Metric("hacpo/ratio", "ratio", "median of learner's token probability over the source's geometric mean"),
    )

    window: int = setting(5, "rounds over which a policy's capability is averaged", ge=1)
    warmup_rounds: int = setting(0, "rounds in which all policies have the same capability", ge=0)
    baseline: Literal["paper", "released"] = setting(
        "paper", "released: clamp w in the baseline, and use the learner's own mean where it exceeds 1"
    )
    ratio_low: float = setting(0.1, "lower bound on the ratio of two capabilities", gt=0, le=1)
    ratio_high: float = setting(10.0, "upper bound on the ratio of two capabilities", ge=1)
    clip_low: float = setting(0.2, "a peer row's ratio is clipped below 1 - clip_low", ge=0, lt=1)
    clip_step: float = setting(0.025, "increase of that bound per optimizer step of a round", ge=0)
    alpha: float = setting(1.0, "exponent of the clipped ratio that weights a peer row", ge=0)
    max_log_ratio: float = setting(10.0, "bound on the absolute log-ratio of a peer row", gt=0)

    @model_validator(mode="after")
    def _acts(self) -> HACPO:
        if self.clip_low == 0 and self.clip_step > 0:
            raise ValueError(f"clip_step ({self.clip_step}) has no effect with clip_low: 0; expected clip_step: 0")
        return self

    def needs(self) -> Needs:
        """Return that it reads all texts and log-probs."""
        reads = PublishSchema.of("text", "logprobs")
        return Needs(reads=reads, advantages="builds the batch", all_texts=True)

    def plan(self, view: RoundView) -> Plan:
        """Return own advantages over the pool of a round, and the peers' rows. Without peers, all w are 1."""
        rates = success_rates(view, self.window)
        capabilities = {name: capability(values, self.window) for name, values in rates.items()}
        self._warn(view.round, capabilities)
        warm = view.round < self.warmup_rounds
        weight, baseline_weight = capability_weights(capabilities, view.learner, self, warm=warm)
        by_prompt, unencodable = peer_rows(view, weight, self)
        own_advantages: dict[str, Floats] = {}
        rows: list[ExtraRow] = []
        for prompt_id, own_rewards in group_by_prompt(view.prompt_ids, view.rewards).items():
            entries = by_prompt.get(prompt_id, [])
            count = len(own_rewards)
            rewards = np.array([*own_rewards, *[reward for _, reward in entries]], dtype=np.float64)
            weights = np.array([1.0] * count + [baseline_weight[row.source.policy] for row, _ in entries])
            values = pooled_advantages(rewards, weights, count, self.baseline)
            own_advantages[prompt_id] = values[:count]
            for (row, _), value in zip(entries, values[count:].tolist(), strict=True):
                rows.append(replace(row, advantage=value))
        return Plan(
            advantages=ungroup(view.prompt_ids, own_advantages),
            rows=tuple(rows),
            metrics={
                "hacpo/rows": float(len(rows)),
                "hacpo/unencodable": float(unencodable),
                "hacpo/capability": capabilities[view.learner],
                "hacpo/advantage_max": max((float(np.abs(a).max()) for a in own_advantages.values()), default=0.0),
                "hacpo/weight": float(np.mean([1 / weight[row.source.policy] for row in rows])) if rows else 0.0,
            },
            state={"shares": rates},
        )

    def row_metrics(self, statistics: RowStatistics) -> dict[str, float]:
        """Return the median over the peers' tokens of the learner's probability over the source's geometric mean."""
        return {"hacpo/ratio": float(np.median(statistics.ratios))} if statistics.ratios.size else {}

    def problems(self, trainer: Settings) -> list[Problem]:
        """Return (key, problem) for trainer settings that do not give own rows GSPO's loss."""
        problems: list[Problem] = []
        level = trainer.get("importance_sampling_level", "token")
        if level != "sequence":
            problems.append(("importance_sampling_level", f"found {level!r}; regime hacpo expects 'sequence' (GSPO)"))
        loss_type = trainer.get("loss_type", "dapo")
        if loss_type != "grpo":
            problems.append(("loss_type", f"found {loss_type!r}; regime hacpo averages over rows: expected 'grpo'"))
        return problems

    def _warn(self, round_index: int, capabilities: Mapping[str, float]) -> None:
        for name, value in capabilities.items():
            if value == FLOOR:
                logger.warning(
                    "round %d: policy %r had no reward above 0 in its last %d rounds: its capability is %g",
                    *(round_index, name, self.window, FLOOR),
                )


def capability(shares: Sequence[float], window: int) -> float:
    """Return the mean of the last `window` success rates, at least FLOOR."""
    return max(float(np.mean(shares[-window:])), FLOOR) if shares else FLOOR


def discrepancy(learner: float, source: float, settings: HACPO) -> float:
    """Return w = clamp(P_learner / P_source, ratio_low, ratio_high)."""
    return min(max(learner / source, settings.ratio_low), settings.ratio_high)


def pooled_advantages(rewards: Floats, weights: Floats, own: int, baseline_of: str = "paper") -> Floats:
    """Return A of the pooled rollouts of one prompt, shape (N,), the learner's `own` rollouts first.

    `weights`: w of each rollout. `baseline_of`: "released" uses the learner's own mean in place of a baseline above 1.
    NaN rewards are excluded and have A = 0.
    """
    scored = ~np.isnan(rewards)
    if not scored.any():
        return np.zeros_like(rewards)
    values = rewards[scored]
    if values.min() == values.max():
        baseline = float(values.mean())
    else:
        baseline = float((values * weights[scored]).mean())
        own_values = rewards[:own][scored[:own]]
        if baseline_of == "released" and baseline > 1 and own_values.size:
            baseline = float(own_values.mean())
    result: Floats = np.where(scored, (rewards - baseline) / (standard_deviation(values) + EPSILON), 0.0)
    return result


def capability_weights(
    able: Mapping[str, float], learner: str, settings: HACPO, *, warm: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return by policy the clamped w that divides a peer's row, and the w of the baseline: in the paper's not clamped,
    except where a capability is FLOOR, which is not a measurement."""
    if warm:
        return dict.fromkeys(able, 1.0), dict.fromkeys(able, 1.0)
    clamped = {name: discrepancy(able[learner], able[name], settings) for name in able}
    if settings.baseline == "released":
        return clamped, clamped
    measured = {name for name in able if min(able[name], able[learner]) > FLOOR}
    return clamped, {name: able[learner] / able[name] if name in measured else clamped[name] for name in able}


def success_rates(view: RoundView, window: int) -> dict[str, list[float]]:
    """Return each policy's success rates in the last `window` rounds, including this one, oldest first."""
    before: Mapping[str, list[float]] = view.state.get("shares", {})
    rewards = {view.learner: view.rewards, **{name: peer.rewards for name, peer in view.peers.items()}}
    rates = {name: list(values) for name, values in before.items()}
    for name in sorted(rewards):
        rate = success_rate(rewards[name])
        if rate is not None:
            rates.setdefault(name, []).append(rate)
        rates[name] = rates.get(name, [])[-window:]
    return rates


def peer_rows(
    view: RoundView, weight: Mapping[str, float], settings: HACPO
) -> tuple[dict[str, list[tuple[ExtraRow, float]]], int]:
    """Return, by prompt, the peers' rollouts on the learner's tokens with their rewards, and the number of those that
    the learner cannot use."""
    bound = Stepwise(settings.clip_low, settings.clip_step, settings.alpha, settings.max_log_ratio)
    by_prompt: dict[str, list[tuple[ExtraRow, float]]] = {}
    unencodable = 0
    rollouts = list(peer_rollouts(view, "text", "logprobs", regime=settings.name))
    for rollout, ids in zip(rollouts, encoded(view, rollouts), strict=True):
        assert rollout.logprobs is not None
        if ids is None or not len(rollout.logprobs) or not np.isfinite(rollout.logprobs).all():
            unencodable += 1
            continue
        masked = view.mask_truncated and not rollout.ended  # as TRL masks own rows: in the pool, not in the loss
        mean = np.mean(rollout.logprobs.astype(np.float64))  # of the source's tokens, so that it needs no alignment
        row = ExtraRow(
            prompt_id=rollout.prompt_id,
            source=RowSource(rollout.policy, rollout.index, view.round),
            token_ids=ids,
            loss="policy_gradient",
            weight=1 / weight[rollout.policy],
            mask=np.zeros(len(ids), dtype=np.bool_) if masked else None,
            logprobs=np.full(len(ids), mean, dtype=np.float32),
            bound=bound,
            mean="pool",
        )
        by_prompt.setdefault(rollout.prompt_id, []).append((row, rollout.reward))
    return by_prompt, unencodable
