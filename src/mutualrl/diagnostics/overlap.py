"""Overlap of the prompts that models solve: pairs, the pool, thirds by difficulty, and SGT's gate rate.

Source: paper, Appendix "Cross-policy complementarity and channel decomposition". Each rate has its 95 % bootstrap
interval over prompts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mutualrl.diagnostics.diagnostic import Interval
from mutualrl.diagnostics.gates import Thresholds, gate_rate, observed_gate
from mutualrl.diagnostics.rollouts import Bools, Floats, ModelRollouts
from mutualrl.diagnostics.statistics import intervals, jaccard, ratio
from mutualrl.storage.files import JsonObject

BUCKETS = ("easy", "medium", "hard")
PAIRS_AT_A_TIME = 1000
PAIR_RATES = ("learner_success", "peer_success", "jaccard", "rescue")
POOL_RATES = ("mean", "any", "all", "exactly_one", "jaccard")


@dataclass(frozen=True, slots=True)
class PairRow:
    """Ordered pair: success rates, overlap (Jaccard, of the solved prompts), and the fraction of the learner's failures
    that the peer solves."""

    learner: str
    peer: str
    learner_success: float
    learner_success_ci: Interval
    peer_success: float
    peer_success_ci: Interval
    jaccard: float
    jaccard_ci: Interval
    rescue: float
    rescue_ci: Interval


@dataclass(frozen=True, slots=True)
class PoolRates:
    """Fractions of the prompts: solved by a model, on average; by any; by all; by exactly one; and the overlap of
    all."""

    mean: float
    mean_ci: Interval
    any: float
    any_ci: Interval
    all: float
    all_ci: Interval
    exactly_one: float
    exactly_one_ci: Interval
    jaccard: float
    jaccard_ci: Interval


@dataclass(frozen=True, slots=True)
class GapBucket:
    """Third of the prompts by difficulty."""

    bucket: str
    prompts: int
    mean_reward: float
    jaccard: float
    exactly_one: float


@dataclass(frozen=True, slots=True)
class GateAt:
    """Gate rate with K rollouts per policy; `extrapolated`: more than were sampled."""

    k: int
    rate: float
    rate_ci: Interval
    extrapolated: bool


@dataclass(frozen=True, slots=True)
class GateRow:
    """Learner's gate rate in these rollouts, and for each K."""

    learner: str
    observed: float
    observed_ci: Interval
    at: tuple[GateAt, ...]


def pair_rows(policies: Sequence[str], solved: Bools, seed: int) -> list[PairRow]:
    """Return the rows of all ordered pairs, in blocks that bound memory; all blocks use the same resamples."""
    pairs = list(itertools.permutations(range(len(solved)), 2))
    rows: list[PairRow] = []
    for start in range(0, len(pairs), PAIRS_AT_A_TIME):
        rows += _rows_of(policies, solved, pairs[start : start + PAIRS_AT_A_TIME], seed)
    return rows


def _rows_of(policies: Sequence[str], solved: Bools, pairs: list[tuple[int, int]], seed: int) -> list[PairRow]:
    units = solved.shape[1]
    learners, peers = solved[[a for a, _ in pairs]], solved[[b for _, b in pairs]]
    columns = np.concatenate([learners, peers, learners & peers]).T.astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        learner, peer, common = np.split(sums, 3, axis=1)
        overlap, rescue = ratio(common, learner + peer - common), ratio(peer - common, units - learner)
        return np.stack([learner / units, peer / units, overlap, rescue], axis=2).reshape(len(sums), -1)

    values = statistic(columns.sum(axis=0)[None])[0]
    bounds = intervals(columns, statistic, seed)
    rows = []
    for pair, (a, b) in enumerate(pairs):
        rates: JsonObject = {}
        for column, key in enumerate(PAIR_RATES, len(PAIR_RATES) * pair):
            rates |= {key: float(values[column]), f"{key}_ci": bounds[column]}
        rows.append(PairRow(policies[a], policies[b], **rates))
    return rows


def pool_rates(solved: Bools, seed: int) -> PoolRates:
    """Return the rates of a pool. `solved`: by model and unit, shape (M, P)."""
    solved_by = solved.sum(axis=0)
    units = solved.shape[1]
    columns = np.stack([solved_by / len(solved), solved_by > 0, solved_by == len(solved), solved_by == 1], axis=1)
    columns = columns.astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        return np.concatenate([sums / units, ratio(sums[:, 2], sums[:, 1])[:, None]], axis=1)

    values = statistic(columns.sum(axis=0)[None])[0]
    rates: JsonObject = {}
    for key, value, interval in zip(POOL_RATES, values, intervals(columns, statistic, seed), strict=True):
        rates |= {key: float(value), f"{key}_ci": interval}
    return PoolRates(**rates)


def bucket_rows(rollouts: ModelRollouts, solved: Bools) -> list[GapBucket]:
    """Return a row per third of the units, sorted by (mean reward over all models and rollouts, prompt id)."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    means = ratio(np.where(scored, rewards, 0.0).sum(axis=(0, 2)), scored.sum(axis=(0, 2)))
    sort_key = np.where(np.isnan(means), -np.inf, means)  # a unit without a scored rollout is hard
    order = sorted(range(len(means)), key=lambda p: (sort_key[p], rollouts.prompt_ids[p], rollouts.rounds[p]))
    rows: list[GapBucket] = []
    thirds = np.array_split(np.array(order, dtype=np.int64), len(BUCKETS))
    for bucket, units in zip(BUCKETS[::-1], thirds, strict=True):
        by_model = solved[:, units]
        rows.append(
            GapBucket(
                bucket=bucket,
                prompts=len(units),
                mean_reward=float(ratio(np.nansum(means[units]), (~np.isnan(means[units])).sum())),
                jaccard=jaccard(by_model),
                exactly_one=float(ratio((by_model.sum(axis=0) == 1).sum(), len(units))),
            )
        )
    return rows[::-1]


def gate_rows(rollouts: ModelRollouts, thresholds: Thresholds, gates: Sequence[int], seed: int) -> list[GateRow]:
    """Return each learner's gate rate in these rollouts, and for each K in `gates`."""
    smallest = int(rollouts.present_M_P_G.sum(axis=2).min())
    columns: list[Floats | Bools] = []
    for m in range(len(rollouts.policies)):
        columns.append(observed_gate(rollouts, thresholds, m))
        columns += [gate_rate(rollouts, thresholds, m, k) for k in gates]
    units = len(rollouts.prompt_ids)
    stacked = np.stack(columns, axis=1).astype(np.float64)
    bounds = intervals(stacked, lambda sums: sums / units, seed)
    means = stacked.mean(axis=0).tolist()
    rows: list[GateRow] = []
    for m, learner in enumerate(rollouts.policies):
        first = m * (1 + len(gates))  # a learner's columns: the observed gate, then one per K
        at = [GateAt(k, means[column], bounds[column], k > smallest) for column, k in enumerate(gates, first + 1)]
        rows.append(GateRow(learner, means[first], bounds[first], tuple(at)))
    return rows


def graded(rollouts: ModelRollouts) -> float:
    """Return the fraction of units whose pooled rewards are not all equal, i.e. where value sharing can change an
    advantage."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=(0, 2))
    lowest = np.where(scored, rewards, np.inf).min(axis=(0, 2))
    return float((highest > lowest).mean())


def better_rate(rollouts: ModelRollouts) -> dict[str, float]:
    """Return, by learner, the fraction of units on which the peers' best reward exceeds the learner's best, i.e. where
    SGT's `gate: relative` opens."""
    rates = {}
    for m, learner in enumerate(rollouts.policies):
        rewards, peer_rewards = rollouts.rewards_M_P_G[m], rollouts.peer_rewards(m)
        best = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
        peer_best = np.where(np.isnan(peer_rewards), -np.inf, peer_rewards).max(axis=1)
        rates[learner] = float((np.isfinite(best) & (peer_best > best)).mean())
    return rates
