"""Complementarity: overlap of the solved prompts by learner and peer, over the pool, and by difficulty.

Source: paper, Appendix "Cross-policy complementarity and channel decomposition", Tables "Prompt-level complementarity",
"Pool-level success", "Difficulty-conditioned diversity"; the gate probability G_n(x) is Definition "Rescue gate
probability". (The paper's tables disagree: the pool's exactly-one rate must be the mean over its equal buckets, which
is 0.060 and 0.056 in one table; the other has 0.174 and 0.152. Here the two agree by construction.)"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from mutualrl.diagnostics.results import Bucket, Complementarity, GateAt, GateRow, PairRow, PoolRates, Recommendation
from mutualrl.diagnostics.rollouts import Bools, Floats, Rollouts
from mutualrl.diagnostics.statistics import all_fail, intervals, jaccard, ratio
from mutualrl.regimes import at_level
from mutualrl.regimes.gating import GateRule

BUCKETS = ("easy", "medium", "hard")
#: below this gate rate a run of 1,000 prompts per round would see fewer than five rescues
SPARSE = 0.005
#: what was measured against the recommendation of `sgt` (benchmarks/results/text_source.json)
SGT_CAVEAT = (
    "Measured against it: on an embedded pool whose policies have the same skills and write differently, SGT ended "
    "below GRPO, HACPO, guided rollouts and SFT then GRPO, and retained less than GRPO of what was solved before "
    "(docs/text-source.md). Compare with grpo over several seeds (mutualrl sweep)."
)


@dataclass(frozen=True)
class Thresholds:
    """Reward thresholds: above `success` a success, below `failure` a failure (paper, Section "Hyperparameters").

    `gate`: whether all or any of a learner's rollouts must fail; `pick`: how SGT draws a success; `own`: overrides of
    single learners, by name. A learner's gate applies its own thresholds to its peers' rewards, as regime `sgt` does;
    whether a model solves a prompt is by that model's."""

    success: float = 0.8
    failure: float = 0.2
    gate: Literal["all", "any"] = "all"
    pick: Literal["uniform", "shortest"] = "uniform"
    own: Mapping[str, Thresholds] = field(default_factory=dict)

    def of(self, learner: str) -> Thresholds:
        """Return the thresholds of one learner."""
        return self.own.get(learner, self)

    def rule(self) -> GateRule:
        """Return them as the rule of a gate."""
        return GateRule(success_above=self.success, failure_below=self.failure, gate=self.gate, pick=self.pick)


def successes(rollouts: Rollouts, thresholds: Thresholds, which: str) -> Bools:
    """Return whether each model solves each unit, shape (M, P): by its first rollout, or by `any`."""
    limits = np.array([thresholds.of(name).success for name in rollouts.policies])
    above: Bools = rollouts.rewards_M_P_G > limits[:, None, None]  # false for NaN
    return np.asarray(above.any(axis=2)) if which == "any" else above[:, :, 0]


def complementarity(
    rollouts: Rollouts, thresholds: Thresholds, which: str, gates: Sequence[int], seed: int
) -> Complementarity:
    """Return `{"policies", "prompts", "success", "samples", "pairs", "pool", "buckets", "gate", "recommended", ...}`;
    each rate has its 95 % bootstrap interval over prompts, under the same name with `_ci`."""
    solved = successes(rollouts, thresholds, which)
    pool = _pool(solved, seed)
    gate = _gate(rollouts, thresholds, gates, seed)
    solved_at_all = successes(rollouts, thresholds, "any")
    advice = _recommended(pool, gate, better_rate(rollouts), rollouts, solved_at_all)
    return {
        "policies": list(rollouts.policies),
        "prompts": solved.shape[1],
        "samples": _samples(rollouts),
        "success": which,
        "pairs": _pairs(rollouts.policies, solved, seed),
        "pool": pool,
        "buckets": _buckets(rollouts, solved),
        "gate": gate,
        "recommended": advice["recommended"],
        "recommendation": advice["recommendation"],
        "caveat": SGT_CAVEAT if advice["recommended"] != "none" else "",
        "graded": _graded(rollouts),
        "settings": advice["settings"],
        "extra_rows": advice["extra_rows"],
    }


def _samples(rollouts: Rollouts) -> dict[str, int]:
    counts = rollouts.present_M_P_G.sum(axis=2)
    return {name: int(counts[m].min()) for m, name in enumerate(rollouts.policies)}


def _pairs(policies: Sequence[str], solved: Bools, seed: int) -> list[PairRow]:
    """Return the rows of all ordered pairs, in blocks that bound memory; all blocks use the same resamples."""
    pairs = list(itertools.permutations(range(len(solved)), 2))
    rows: list[PairRow] = []
    for start in range(0, len(pairs), PAIRS_AT_A_TIME):
        rows += _pair_rows(policies, solved, pairs[start : start + PAIRS_AT_A_TIME], seed)
    return rows


def _pair_rows(policies: Sequence[str], solved: Bools, pairs: list[tuple[int, int]], seed: int) -> list[PairRow]:
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
        row: dict[str, Any] = {"learner": policies[a], "peer": policies[b]}
        for column, name in enumerate(PAIR_RATES, len(PAIR_RATES) * pair):
            row |= {name: float(values[column]), f"{name}_ci": list(bounds[column])}
        rows.append(cast(PairRow, row))
    return rows


PAIRS_AT_A_TIME = 1000
PAIR_RATES = ("learner_success", "peer_success", "jaccard", "rescue")
POOL_RATES = ("mean", "any", "all", "exactly_one", "jaccard")


def _pool(solved: Bools, seed: int) -> PoolRates:
    solved_by = solved.sum(axis=0)
    units = solved.shape[1]
    columns = np.stack([solved_by / len(solved), solved_by > 0, solved_by == len(solved), solved_by == 1], axis=1)
    columns = columns.astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        return np.concatenate([sums / units, ratio(sums[:, 2], sums[:, 1])[:, None]], axis=1)

    values = statistic(columns.sum(axis=0)[None])[0]
    pool: dict[str, Any] = {}
    for name, value, interval in zip(POOL_RATES, values, intervals(columns, statistic, seed), strict=True):
        pool |= {name: float(value), f"{name}_ci": list(interval)}
    return cast(PoolRates, pool)


def _buckets(rollouts: Rollouts, solved: Bools) -> list[Bucket]:
    """Return a row per third of the units, sorted by (mean reward over all models and rollouts, prompt id)."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    means = ratio(np.where(scored, rewards, 0.0).sum(axis=(0, 2)), scored.sum(axis=(0, 2)))
    sort_key = np.where(np.isnan(means), -np.inf, means)  # a unit without a scored rollout is hard
    order = sorted(range(len(means)), key=lambda p: (sort_key[p], rollouts.prompt_ids[p], rollouts.rounds[p]))
    rows: list[Bucket] = []
    for name, units in zip(BUCKETS[::-1], np.array_split(np.array(order, dtype=np.int64), len(BUCKETS)), strict=True):
        bucket = solved[:, units]
        rows.append(
            {
                "bucket": name,
                "prompts": len(units),
                "mean_reward": float(ratio(np.nansum(means[units]), (~np.isnan(means[units])).sum())),
                "jaccard": jaccard(bucket),
                "exactly_one": float(ratio((bucket.sum(axis=0) == 1).sum(), len(units))),
            }
        )
    return rows[::-1]


def gate_rate(rollouts: Rollouts, thresholds: Thresholds, learner: int, k: int) -> Floats:
    """Return G_n(x) = (1 - p_n)^K (1 - prod over peers of (1 - p_m)^K) of every unit, shape (P,).

    Estimated from counts of the learner's failures (below `failure`; with `gate: any`, P(at least one of K)) and of the
    peers' successes (above `success`). A product of estimates over independent rollouts: unbiased for K up to each
    model's number of rollouts; at that number, the observed gate. An unscorable rollout counts as neither."""
    rule = thresholds.of(rollouts.policies[learner])
    rewards, counts = rollouts.rewards_M_P_G, rollouts.present_M_P_G.sum(axis=2)
    failures = (rewards[learner] < rule.failure).sum(axis=1)
    if rule.gate == "all":
        failed = all_fail(counts[learner], counts[learner] - failures, k)
    else:
        failed = 1 - all_fail(counts[learner], failures, k)
    peers = np.ones(rewards.shape[1])
    for m in rollouts.peers_of(learner):
        peers = peers * all_fail(counts[m], (rewards[m] > rule.success).sum(axis=1), k)
    rate: Floats = failed * (1 - peers)
    return rate


def observed_gate(rollouts: Rollouts, thresholds: Thresholds, learner: int) -> Bools:
    """Return SGT's gate on these rollouts, shape (P,): all (or any) of the learner's rewards below `failure`, and some
    peer reward above `success`."""
    rule = thresholds.of(rollouts.policies[learner])
    low = rollouts.rewards_M_P_G[learner] < rule.failure
    failed = (low | ~rollouts.present_M_P_G[learner]).all(axis=1) if rule.gate == "all" else low.any(axis=1)
    gate: Bools = failed & (rollouts.peer_rewards(learner) > rule.success).any(axis=1)
    return gate


def _gate(rollouts: Rollouts, thresholds: Thresholds, gates: Sequence[int], seed: int) -> list[GateRow]:
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
    for m, name in enumerate(rollouts.policies):
        first = m * (1 + len(gates))  # a learner's columns: the observed gate, then one per K
        gates_at: list[GateAt] = []
        for column, k in enumerate(gates, first + 1):
            rate, rate_ci = means[column], list(bounds[column])
            gates_at.append({"k": k, "rate": rate, "rate_ci": rate_ci, "extrapolated": k > smallest})
        rows.append({"learner": name, "observed": means[first], "observed_ci": list(bounds[first]), "at": gates_at})
    return rows


def _graded(rollouts: Rollouts) -> float:
    """Return the fraction of units whose pooled rewards are not all equal, i.e. where value sharing can change an
    advantage."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=(0, 2))
    lowest = np.where(scored, rewards, np.inf).min(axis=(0, 2))
    return float((highest > lowest).mean())


def better_rate(rollouts: Rollouts) -> dict[str, float]:
    """Return, by learner, the fraction of units on which the peers' best reward exceeds the learner's best, i.e. where
    SGT's `gate: relative` opens."""
    rates = {}
    for m, name in enumerate(rollouts.policies):
        rewards, peer_rewards = rollouts.rewards_M_P_G[m], rollouts.peer_rewards(m)
        best = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
        peer_best = np.where(np.isnan(peer_rewards), -np.inf, peer_rewards).max(axis=1)
        rates[name] = float((np.isfinite(best) & (peer_best > best)).mean())
    return rates


def _recommended(
    pool: PoolRates, gate: Sequence[GateRow], better: Mapping[str, float], rollouts: Rollouts, solved_at_all: Bools
) -> Recommendation:
    """Return a regime, or none, with its reason and its predicted cost. `solved_at_all`: by any rollout, shape (M, P).

    Criteria: SGT's gate rate and, with graded rewards, how often a peer does better. Pooling whole batches (prp, hacpo,
    swarm) and sharing only rewards (xgrpo) were not shown to help where SGT's gate stays closed, and some variants were
    shown to do harm (docs/study.md), so they are not recommended.
    """
    prompts, group = len(rollouts.prompt_ids), max(_samples(rollouts).values())
    rates = ", ".join(f"{row['learner']} {row['observed']:.1%}" for row in gate)
    best = max(gate, key=lambda row: row["observed"])
    rewards = rollouts.rewards_M_P_G[~np.isnan(rollouts.rewards_M_P_G)]
    graded = len(np.unique(rewards)) > 2

    def advice(choice: str, text: str, open_rates: Sequence[float] = (), **settings: Any) -> Recommendation:
        extra = float(np.mean(open_rates)) / group if open_rates else 0.0
        cost = f"; at most {extra:.1%} more rows in the loss than under GRPO" if open_rates else ""
        return {
            "recommended": choice,
            "recommendation": f"{choice}{_assignments(settings)}: {text}{cost}",
            "settings": settings,
            "extra_rows": extra,
        }

    if not solved_at_all.any() and not graded:
        text = (
            f"no model solved any of the {prompts} prompts, so none can teach another; choose easier ones, raise "
            "--max-new-tokens or --samples, or check the reward (mutualrl train --dry-run)"
        )
        return advice("none", text)
    if pool["all"] == 1 and not graded:
        return advice("none", f"every model solves all {prompts} prompts; choose harder ones")
    if best["observed"] >= SPARSE and best["observed_ci"][0] > 0:
        text = f"its gate would open on {rates} of the prompts, where the learner fails and a peer does not"
        if closed := [row["learner"] for row in gate if row["observed"] < SPARSE]:
            text += f"; help is one-way: for {' and '.join(closed)} it would rarely open"
        return advice(at_level("outcome").name, text, [row["observed"] for row in gate])
    if graded and max(better.values()) >= SPARSE:
        peer_rates = ", ".join(f"{name} {rate:.1%}" for name, rate in better.items())
        text = f"no learner fails where a peer succeeds ({rates}), but a peer's best reward is higher on {peer_rates}"
        return advice(at_level("outcome").name, text, list(better.values()), gate="relative")
    if best["observed"] >= SPARSE:
        text = f"SGT's gate opened on {rates} of {prompts} prompts, too few to tell from chance; use more (--prompts)"
        return advice("none", text)
    return advice("none", f"SGT's gate would rarely open ({rates}); these models solve the same prompts")


def _assignments(settings: Mapping[str, Any]) -> str:
    """Return settings as command-line flags."""
    return "".join(f" --set regime.{key}={value}" for key, value in settings.items())
