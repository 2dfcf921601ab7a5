"""Peer Rollout Pooling (PRP): the learner trains on its own rollouts and every peer's, normalised as one pool.

Pure functions: rewards and traces in, rows and advantages out. Source: paper, Section "Regime 1: Data-level experience
sharing". Own rows keep their own denominator and surrogate. Departures and interpretations: a peer's row that the
learner cannot encode is left out of the pool, not truncated; the KL penalty applies to own rows only (its estimator
holds only for the learner's samples), at full weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from mutualrl.records import Ids, PublishSchema, Rollout, plain_ids
from mutualrl.regimes.advantages import Floats, group_by_prompt, pool_advantages, standard_deviation, ungroup
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.peers import encoded, peer_rollouts
from mutualrl.regimes.regime import Problem, Regime, Settings, setting
from mutualrl.regimes.round import (
    PPO,
    Band,
    Bound,
    ExtraRow,
    Plan,
    Requests,
    RoundView,
    RowSource,
    RowStatistics,
    UpperBound,
)
from mutualrl.regimes.transfer import Aligned
from mutualrl.storage.metrics import Metric

Graded = tuple[ExtraRow, float]
#: residual of a row's alignment: |R| in nats, C_mis in tokens, the mass removed by the clip in nats
Residual = tuple[float, int, float]


class PRP(Regime):
    """PRP. `peer` with `ppo` is the paper's corrected pooling, `snapshot` its naive pooling; `band` is the weight of
    the paper's theory (Theorem "Bias and variance of PRP"), which its experiments do not use."""

    name = "prp"
    summary = "own and peers' rollouts as one batch, with the peers' aligned traces as denominators"
    level = "data"
    metrics = (
        Metric("prp/rows", "rows", "peer rows that joined the batch", role="action"),
        Metric("prp/unencodable", "rows", "peer rows that the learner cannot encode, or that were not scored"),
        Metric("prp/untrusted", "rows", "peer rows outside the band, under `trust: band`"),
        Metric("prp/dropped", "rows", "of negative advantage that were left out, with `max_negative_kl`"),
        Metric("prp/uncovered", "fraction", "tokens of the peer rows without an aligned log-prob"),
        Metric("prp/delta_thl", "nats", "mean mass of a peer row's trace assigned to no token", "delta_THL"),
        Metric("prp/mismatched", "tokens", "mean number of a peer row's tokens with mass assigned to no token"),
        Metric("prp/clipped_mass", "nats", "mean mass of a peer row's trace removed by the clip at -B"),
        Metric("prp/ratio_p99", "ratio", "99th percentile on covered peer tokens", "ratio, 99th percentile"),
        Metric("prp/clip_rate", "fraction", "covered peer tokens whose ratio is outside the clip range", "clip rate"),
        Metric("prp/ess", "fraction", "lowest effective sample size of a peer's token ratios", "effective sample size"),
        Metric("prp/token_chi_square", "ratio", "highest mean square of a peer's token ratios, minus 1"),
        Metric("prp/response_chi_square", "ratio", "highest chi-square estimate from a peer's whole responses"),
    )

    denominator: Literal["peer", "snapshot"] = setting(
        "peer",
        "log-probs in the denominator of a peer row's ratio: the peer's, aligned, or the learner's",
        variants=("snapshot",),
    )
    clip: Literal["ppo", "band", "above"] = setting(
        "ppo",
        "ppo: TRL's two-sided surrogate; band: the ratio clipped to [1 - eps, 1 + eps], detached; above: clipped at "
        "`cap` from above only, detached (truncated importance sampling)",
        variants=("band", "above"),
    )
    cap: float = setting(1.0, "upper bound on the ratio of each token", acts_with={"clip": "above"}, gt=0)
    delta: float = setting(
        4.0,
        "TRL's `delta` for peer rows, with clip: ppo (cispo, sapo and vespo have their own bound)",
        acts_with={"clip": "ppo"},
        gt=1,
    )
    anchor: Literal["span", "word", "char", "paper", "paper-fallback"] = setting(
        "span", "how traces are aligned (THL)", acts_with={"denominator": "peer"}
    )
    trust: Literal["all", "band"] = setting(
        "all",
        "band: only peer rows whose ratio exp(mean log-ratio) is in the trainer's clip range join",
        acts_with={"denominator": "peer"},
        variants=("band",),
    )

    max_negative_kl: float | None = setting(
        None,
        "F-TIS: a peer row of negative advantage is left out if the mean of log mu - log pi over its tokens, an "
        "estimate of KL(mu || pi), is above this; null: none is",
        acts_with={"denominator": "peer"},
        ge=0,
    )

    def needs(self) -> Needs:
        """Return that it reads all texts, and with `denominator: peer` ids and log-probs; a late row joins the
        next batch."""
        reads = PublishSchema.of("text", *(("token_ids", "logprobs") if self.denominator == "peer" else ()))
        return Needs(reads=reads, advantages="builds the batch", all_texts=True, late=True)

    def requests(self, view: RoundView) -> Requests:
        """Return the peers' rows, to be scored for `trust: band` and `max_negative_kl`."""
        if self.trust == "all" and self.max_negative_kl is None:
            return Requests()
        graded, _, _ = peer_rows(view, self)
        return Requests(logprobs=tuple((row.prompt_id, plain_ids(row.token_ids)) for row, _ in graded))

    def plan(self, view: RoundView) -> Plan:
        """Return own advantages over the pool of a round, and the peers' rows. Without peers nothing changes."""
        graded, unencodable, residuals = peer_rows(view, self)
        counts = {"prp/unencodable": float(unencodable)}
        if self.trust == "band":
            encoded = len(graded)
            graded = trusted(view, graded)
            counts["prp/untrusted"] = float(encoded - len(graded))
        if not graded:
            return Plan(metrics={**counts, "prp/rows": 0.0})
        graded = without_truncated(view, graded)
        own, rows = pool(group_by_prompt(view.prompt_ids, view.rewards), graded, view.scale)
        if self.max_negative_kl is not None:
            kept = within_kl(view, rows, self.max_negative_kl)
            counts["prp/dropped"] = float(len(rows) - len(kept))
            rows = kept
        tokens = sum(len(row.token_ids) for row in rows)
        covered = sum(int(row.covered.sum()) for row in rows)
        return Plan(
            advantages=ungroup(view.prompt_ids, own),
            rows=tuple(rows),
            metrics={
                **counts,
                "prp/rows": float(len(rows)),
                "prp/uncovered": (tokens - covered) / max(tokens, 1),
                **residual_metrics(residuals),
            },
        )

    def row_metrics(self, statistics: RowStatistics) -> dict[str, float]:
        """Return the metrics of the peer rows' ratios."""
        return ratio_metrics(statistics)

    def problems(self, trainer: Settings) -> list[Problem]:
        """Return (key, problem) for trainer settings that the loss over peer rows does not support."""
        high = trainer.get("epsilon_high")
        above = 1 + float(trainer.get("epsilon", 0.2) if high is None else high)
        problems: list[Problem] = []
        bounds_ratios = trainer.get("loss_type") in ("cispo", "sapo", "vespo")
        if self.clip == "ppo" and not bounds_ratios and self.delta <= above:
            problem = f"the upper clip is {above:g}, regime.delta is {self.delta:g}; expected a larger delta"
            problems.append(("epsilon", problem))
        if self.clip == "ppo" and bounds_ratios and self.delta != PRP().delta:
            problem = f"found {trainer['loss_type']!r}, with which regime.delta has no effect; leave regime.delta out"
            problems.append(("loss_type", problem))
        if self.clip != "ppo":
            for key, plain in BAND_PLAIN.items():
                if trainer.get(key, plain[0]) not in plain:
                    found = f"found {trainer[key]!r}, which regime.clip: {self.clip} does not support"
                    problem = f"{found}; expected {plain[0]!r}"
                    problems.append((key, problem))
        return problems


def pool(
    own: Mapping[str, Sequence[float]], rows: Sequence[Graded], scale: str
) -> tuple[dict[str, Floats], list[ExtraRow]]:
    """Return the advantages of own rollouts by prompt, and the rows with theirs, normalised over own and peer
    rollouts together."""
    rewards: dict[str, list[float]] = {}
    for row, reward in rows:
        rewards.setdefault(row.prompt_id, []).append(reward)
    pools = {prompt: [*group, *rewards.get(prompt, ())] for prompt, group in own.items()}
    batch_std = standard_deviation([reward for values in pools.values() for reward in values])
    advantages = {
        prompt: pool_advantages(values, values, scale=scale, batch_standard_deviation=batch_std)
        for prompt, values in pools.items()
    }
    own_part = {prompt: values[: len(own[prompt])] for prompt, values in advantages.items()}
    peer_part = []
    used = {prompt: len(group) for prompt, group in own.items()}  # own rollouts come first in a pool
    for row, _ in rows:
        index = used[row.prompt_id]
        used[row.prompt_id] = index + 1
        peer_part.append(replace(row, advantage=float(advantages[row.prompt_id][index])))
    return own_part, peer_part


def peer_rows(view: RoundView, settings: PRP) -> tuple[list[Graded], int, list[Residual]]:
    """Return the peer rollouts that the learner can encode, with their rewards, sorted by (prompt, policy, rollout);
    the number that it cannot encode; and the residuals of the alignments, if traces are aligned."""
    fields = ("text", "token_ids", "logprobs") if settings.denominator == "peer" else ("text",)
    rollouts = list(peer_rollouts(view, *fields, regime=settings.name))
    usable: list[Rollout] = []
    ids_R: list[Ids] = []
    for rollout, ids in zip(rollouts, encoded(view, rollouts), strict=True):
        scored = rollout.logprobs is None or not np.isnan(rollout.logprobs).any()  # NaN: the engine could not score it
        if ids is not None and scored:
            usable.append(rollout)
            ids_R.append(ids)
    unencodable = len(rollouts) - len(usable)
    if settings.denominator == "peer":
        aligned_R = view.transfer.align(usable, ids_R, settings.anchor)
        rows = [_row(view, settings, *each) for each in zip(usable, ids_R, aligned_R, strict=True)]
        residuals = [(abs(aligned.residual), aligned.mismatched, abs(aligned.clipped)) for aligned in aligned_R]
    else:
        rows, residuals = [_row(view, settings, *each) for each in zip(usable, ids_R, strict=True)], []
    graded = [(row, rollout.reward) for row, rollout in zip(rows, usable, strict=True)]
    graded.sort(key=lambda entry: (entry[0].prompt_id, entry[0].source.policy, entry[0].source.rollout))
    return graded, unencodable, residuals


def _row(view: RoundView, settings: PRP, rollout: Rollout, ids: Ids, aligned: Aligned | None = None) -> ExtraRow:
    """Return a peer's rollout on the learner's tokens `ids`, without its advantage."""
    return ExtraRow(
        prompt_id=rollout.prompt_id,
        source=RowSource(rollout.policy, rollout.index, view.round),
        token_ids=ids,
        loss="policy_gradient",
        mask=np.ones(len(ids), dtype=np.bool_) if aligned is None else aligned.covered,
        logprobs=None if aligned is None else aligned.logprobs.astype(np.float32),
        bound=_bound(settings),
        mean="pool",
    )


def _bound(settings: PRP) -> Bound:
    """Return how the ratios of peer rows are bounded."""
    if settings.clip == "ppo":
        return PPO(settings.delta)
    return Band() if settings.clip == "band" else UpperBound(settings.cap)


def within_kl(view: RoundView, rows: Sequence[ExtraRow], most: float) -> list[ExtraRow]:
    """Return the rows but those of negative advantage whose mean of log mu - log pi over covered tokens is above
    `most`. Their rewards have joined the pool's mean: they are left out of the loss only (F-TIS, arXiv 2605.22537)."""
    kept = []
    for row in rows:
        ratio = sequence_ratio(view.results.logprobs[row.prompt_id, plain_ids(row.token_ids)], row)
        kl = -math.log(ratio) if ratio else math.inf  # NaN: no token is covered
        if row.advantage >= 0 or not kl > most:
            kept.append(row)
    return kept


def without_truncated(view: RoundView, graded: Sequence[Graded]) -> list[Graded]:
    """Return the rows, with truncated ones masked if the trainer masks its own: in the pool, not in the loss."""
    if not view.mask_truncated:
        return list(graded)
    ended = {(rollout.policy, rollout.prompt_id, rollout.index): rollout.ended for rollout in peer_rollouts(view)}
    masked = []
    for row, reward in graded:
        done = ended[row.source.policy, row.prompt_id, row.source.rollout]
        masked.append((row if done else replace(row, mask=np.zeros(len(row.token_ids), dtype=np.bool_)), reward))
    return masked


def sequence_ratio(logprobs: Floats, row: ExtraRow) -> float:
    """Return exp(mean over the row's covered tokens of log pi_learner - log mu); NaN without any. The paper's
    measure of the channel (Appendix "Channel decomposition of the three sharing regimes")."""
    assert row.logprobs is not None
    covered = row.covered
    return float(np.exp((logprobs - row.logprobs)[covered].mean())) if covered.any() else float("nan")


def trusted(view: RoundView, graded: Sequence[Graded]) -> list[Graded]:
    """Return the rows whose sequence ratio is in [1 - epsilon_low, 1 + epsilon_high] of the trainer."""
    low, high = 1 - view.clip[0], 1 + view.clip[1]
    within = []
    for row, reward in graded:
        logprobs = view.results.logprobs[row.prompt_id, plain_ids(row.token_ids)]
        if low <= sequence_ratio(logprobs, row) <= high:
            within.append((row, reward))
    return within


def residual_metrics(residuals: Sequence[Residual]) -> dict[str, float]:
    """Return the means per row of delta_THL = |R|, C_mis and the clipped mass (paper, Theorem "THL conservation with a
    derived residual bound"); empty if no trace was aligned."""
    if not residuals:
        return {}
    deltas, mismatched, clipped = zip(*residuals, strict=True)
    return {
        "prp/delta_thl": float(np.mean(deltas)),
        "prp/mismatched": float(np.mean(mismatched)),
        "prp/clipped_mass": float(np.mean(clipped)),
    }


def ratio_metrics(statistics: RowStatistics) -> dict[str, float]:
    """Return the 99th percentile of the ratios of covered peer tokens and the fraction outside the clip range; each
    peer's effective sample size, and its chi-square estimates over tokens and over responses; and over the peers the
    lowest size and the highest estimates."""
    ratios = statistics.ratios
    if not ratios.size:
        return {}
    ordered = np.sort(ratios)
    outside = (ratios < statistics.low) | (ratios > statistics.high)
    peers = {name: values for name, values in sorted(statistics.by_policy.items()) if values.size}
    sizes = {f"prp/ess/{name}": effective_sample_size(values) for name, values in peers.items()}
    of_tokens = {f"prp/token_chi_square/{name}": RatioMoments.of(values).chi_square for name, values in peers.items()}
    of_responses = {
        f"prp/response_chi_square/{name}": chi_square(statistics.response_log_ratios[name]) for name in peers
    }
    metrics = {
        "prp/ratio_p99": float(ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]),
        "prp/clip_rate": float(outside.mean()),
    }
    if peers:
        metrics["prp/ess"] = min(sizes.values())
        metrics["prp/token_chi_square"] = max(of_tokens.values())
        metrics["prp/response_chi_square"] = max(of_responses.values())
    return {**metrics, **sizes, **of_tokens, **of_responses}


class RatioMoments(NamedTuple):
    """Number, sum and sum of squares of importance ratios rho; additive over parts."""

    n: float
    total: float
    squares: float

    @classmethod
    def of(cls, ratios: Floats) -> RatioMoments:
        """Return the moments of ratios."""
        return cls(ratios.size, float(ratios.sum()), float((ratios**2).sum()))

    @property
    def effective_sample_size(self) -> float:
        """Return (sum rho)^2 / (n sum rho^2): the effective fraction of the samples."""
        return self.total**2 / (self.n * self.squares) if self.squares > 0 else 0.0

    @property
    def chi_square(self) -> float:
        """Return mean(rho^2) - 1. Over tokens it measures their ratios alone: the theorem's chi-square is that of whole
        responses (`chi_square`)."""
        return self.squares / self.n - 1.0


def effective_sample_size(ratios: Floats) -> float:
    """Return the effective sample size of ratios, as a fraction of their number."""
    return RatioMoments.of(ratios).effective_sample_size


def chi_square(log_ratios: Floats) -> float:
    """Return mean(exp(2 log rho)) - 1 over the behaviour policy's samples; infinite above 1e308.

    With log rho(y) = sum over a response's covered tokens of log pi - log mu, this estimates chi^2(pi || mu), which
    bounds the variance of PRP (paper, Theorem "PRP bias-variance decomposition"). It is dominated by its largest terms:
    from few responses it is mostly too small."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.logaddexp.reduce(2 * log_ratios) - np.log(len(log_ratios))) - 1.0)


#: settings of TRL's loss without a counterpart in `clip: band`, and the values with which they are unused.
BAND_PLAIN: dict[str, tuple[object, ...]] = {
    "importance_sampling_level": ("token",),
    "off_policy_mask_threshold": (None,),
    "top_entropy_quantile": (1.0, 1),
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "luspo"),
}
