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
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mutualrl.errors import DataError
from mutualrl.records import PublishSchema
from mutualrl.regimes.advantages import Floats, group_by_prompt, standard_deviation, success_rate, ungroup
from mutualrl.regimes.round import ExtraRow, PeerRound, Plan, RoundView, RowSource, RowStatistics, Stepwise
from mutualrl.regimes.spec import Metric, Problem, RegimeSettings, RegimeSpec

logger = logging.getLogger(__name__)

FLOOR = 1e-8  # capability of a policy that never succeeds
EPSILON = 1e-6  # added to the standard deviation


class HACPOSettings(RegimeSettings):
    """Settings of HACPO: defaults from the released code, except the paper's baseline."""

    window: int = Field(5, ge=1, description="rounds over which a policy's capability is averaged")
    warmup_rounds: int = Field(0, ge=0, description="rounds in which all policies have the same capability")
    baseline: Literal["paper", "released"] = Field(
        "paper", description="released: clamp w in the baseline, and use the learner's own mean where it exceeds 1"
    )
    ratio_low: float = Field(0.1, gt=0, le=1, description="lower bound on the ratio of two capabilities")
    ratio_high: float = Field(10.0, ge=1, description="upper bound on the ratio of two capabilities")
    clip_low: float = Field(0.2, ge=0, lt=1, description="a peer row's ratio is clipped below 1 - clip_low")
    clip_step: float = Field(0.025, ge=0, description="increase of that bound per optimizer step of a round")
    alpha: float = Field(1.0, ge=0, description="exponent of the clipped ratio that weights a peer row")
    max_log_ratio: float = Field(10.0, gt=0, description="bound on the absolute log-ratio of a peer row")

    @model_validator(mode="after")
    def _acts(self) -> HACPOSettings:
        if self.clip_low == 0 and self.clip_step > 0:
            raise ValueError(f"clip_step ({self.clip_step}) has no effect with clip_low: 0; expected clip_step: 0")
        return self


def capability(shares: Sequence[float], window: int) -> float:
    """Return the mean of the last `window` success rates, at least FLOOR."""
    return max(float(np.mean(shares[-window:])), FLOOR) if shares else FLOOR


def discrepancy(learner: float, source: float, settings: HACPOSettings) -> float:
    """Return w = clamp(P_learner / P_source, ratio_low, ratio_high)."""
    return min(max(learner / source, settings.ratio_low), settings.ratio_high)


def advantages(rewards: Floats, weights: Floats, own: int, baseline_of: str = "paper") -> Floats:
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


def plan(view: RoundView, settings: RegimeSettings) -> Plan:
    """Return own advantages over the pool of a round, and the peers' rows. Without peers, A has w = 1 throughout."""
    assert isinstance(settings, HACPOSettings)
    success_rates = _success_rates(view, settings)
    capabilities = {name: capability(values, settings.window) for name, values in success_rates.items()}
    for name, value in capabilities.items():
        if value == FLOOR:
            logger.warning(
                "round %d: policy %r had no reward above 0 in its last %d rounds: its capability is %g",
                *(view.round, name, settings.window, FLOOR),
            )
    warm = view.round < settings.warmup_rounds
    weight, baseline_weight = capability_weights(capabilities, view.learner, settings, warm=warm)

    rows_of: dict[str, list[tuple[ExtraRow, float]]] = {prompt_id: [] for prompt_id in view.prompt_ids}
    unfit = 0
    for name, peer in sorted(view.peers.items()):
        for row, reward in _rows(view, name, peer, weight[name], settings):
            if row is None:
                unfit += 1
            else:
                rows_of[row.prompt_id].append((row, reward))

    own_advantages: dict[str, Floats] = {}
    rows: list[ExtraRow] = []
    for prompt_id, own_rewards in group_by_prompt(view.prompt_ids, view.rewards).items():
        peer_entries = rows_of[prompt_id]
        count = len(own_rewards)
        rewards = np.array([*own_rewards, *[reward for _, reward in peer_entries]], dtype=np.float64)
        weights = np.array([1.0] * count + [baseline_weight[row.source.policy] for row, _ in peer_entries])
        values = advantages(rewards, weights, count, settings.baseline)
        own_advantages[prompt_id] = values[:count]
        for (row, _), value in zip(peer_entries, values[count:].tolist(), strict=True):
            rows.append(replace(row, advantage=value))
    return Plan(
        advantages=ungroup(view.prompt_ids, own_advantages),
        rows=tuple(rows),
        metrics={
            "hacpo/rows": float(len(rows)),
            "hacpo/unfit": float(unfit),
            "hacpo/extra_tokens": float(sum(len(row.token_ids) for row in rows)),
            "hacpo/capability": capabilities[view.learner],
            "hacpo/advantage_max": max((float(np.abs(a).max()) for a in own_advantages.values()), default=0.0),
            "hacpo/weight": float(np.mean([1 / weight[row.source.policy] for row in rows])) if rows else 0.0,
        },
        state={"shares": success_rates},
    )


def capability_weights(
    able: Mapping[str, float], learner: str, settings: HACPOSettings, *, warm: bool
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


def _success_rates(view: RoundView, settings: HACPOSettings) -> dict[str, list[float]]:
    """Return each policy's success rates in the last rounds, including this one, oldest first."""
    before: Mapping[str, list[float]] = view.state.get("shares", {})
    rewards = {view.learner: view.rewards, **{name: peer.column("reward") for name, peer in view.peers.items()}}
    rates = {name: list(values) for name, values in before.items()}
    for name in sorted(rewards):
        rate = success_rate(rewards[name])
        if rate is not None:
            rates.setdefault(name, []).append(rate)
        rates[name] = rates.get(name, [])[-settings.window :]
    return rates


def _rows(
    view: RoundView, name: str, peer: PeerRound, weight: float, settings: HACPOSettings
) -> list[tuple[ExtraRow | None, float]]:
    """Return a peer's rollouts on the learner's tokens, with their rewards; None for one that the learner cannot
    use."""
    bound = Stepwise(settings.clip_low, settings.clip_step, settings.alpha, settings.max_log_ratio)
    columns = [peer.column(c) for c in ("prompt_id", "rollout", "reward", "ended", "y_text", "logprobs")]
    rows: list[tuple[ExtraRow | None, float]] = []
    for prompt_id, rollout, reward, ended, text, trace in zip(*columns, strict=True):
        if text is None or trace is None:
            raise DataError(
                f"policy {name!r} published no text or trace of rollout {rollout} on {prompt_id!r}; regime hacpo needs "
                "them from every policy of the pool"
            )
        ids = view.transfer.to_learner_ids(text, ended)
        if ids is None or not len(trace) or not np.isfinite(trace).all():
            rows.append((None, reward))
            continue
        masked = view.mask_truncated and not ended  # as TRL masks own rows: in the pool, not in the loss
        row = ExtraRow(
            prompt_id=prompt_id,
            source=RowSource(name, rollout, view.round),
            token_ids=ids,
            loss="policy_gradient",
            weight=1 / weight,
            mask=np.zeros(len(ids), dtype=np.bool_) if masked else None,
            logprobs=np.full(len(ids), np.mean(trace), dtype=np.float32),  # the mean over any tokens is the source's
            bound=bound,
            mean="pool",
        )
        rows.append((row, reward))
    return rows


def row_metrics(statistics: RowStatistics) -> dict[str, float]:
    """Return the median over the peers' tokens of the learner's probability over the source's geometric mean."""
    return {"hacpo/ratio": float(np.median(statistics.ratios))} if statistics.ratios.size else {}


def check(settings: HACPOSettings, trainer: Mapping[str, Any]) -> list[Problem]:
    """Return (key, problem) for trainer settings that do not give own rows GSPO's loss."""
    problems: list[Problem] = []
    level = trainer.get("importance_sampling_level", "token")
    if level != "sequence":
        problems.append(("importance_sampling_level", f"found {level!r}; regime hacpo expects 'sequence' (GSPO)"))
    loss_type = trainer.get("loss_type", "dapo")
    if loss_type != "grpo":
        problems.append(("loss_type", f"found {loss_type!r}; regime hacpo averages over rows: expected 'grpo'"))
    return problems


def publishes(settings: HACPOSettings) -> PublishSchema:
    """Return the fields that peers read: texts and log-probs."""
    return PublishSchema.of("text", "logprobs")


SPEC = RegimeSpec(
    name="hacpo",
    summary="own and peers' rollouts as one batch, weighted by each policy's capability (HACPO)",
    settings=HACPOSettings,
    publishes=publishes,
    plan=plan,
    moves_advantages=True,
    pools=True,
    check=check,
    metrics=(
        Metric("hacpo/rows", "rows", "peer rows that joined the batch", role="action"),
        Metric("hacpo/unfit", "rows", "peer rows that the learner cannot encode, or that were not scored"),
        Metric("hacpo/extra_tokens", "tokens", "tokens of the peer rows"),
        Metric("hacpo/capability", "fraction", "mean success rate over the last rounds", "capability"),
        Metric("hacpo/advantage_max", "advantage", "largest absolute own advantage"),
        Metric("hacpo/weight", "ratio", "mean weight of the peer rows, 1 / w", "weight of peer rows"),
        Metric("hacpo/ratio", "ratio", "median of learner's token probability over the source's geometric mean"),
    ),
    row_metrics=row_metrics,
)
