"""Will these models help each other? Overlap of what they solve, by learner and peer, pool, and difficulty.

Source: paper, Appendix "Cross-policy complementarity and channel decomposition", Tables "Prompt-level complementarity",
"Pool-level success", "Difficulty-conditioned diversity"; the gate probability G_n(x) is Definition "Rescue gate
probability". (The paper's tables disagree: exactly-one of the pool is the mean of its equal buckets', which is 0.060
and 0.056 in the one, where the other says 0.174 and 0.152. Here the two agree by construction.)"""

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
from mutualrl.regimes.sgt import SGTSettings

BUCKETS = ("easy", "medium", "hard")
#: below this gate rate a run of 1,000 prompts per round would see fewer than five rescues
SPARSE = 0.005


@dataclass(frozen=True)
class Thresholds:
    """Rollout rewarded above `success` is a success, below `failure` a failure (paper, Section "Hyperparameters").

    `gate`: whether all of a learner's rollouts must have failed, or any; `pick`: how SGT draws a success; `own`: where
    a learner has thresholds of its own, by name."""

    success: float = 0.8
    failure: float = 0.2
    gate: Literal["all", "any"] = "all"
    pick: Literal["uniform", "shortest", "first"] = "uniform"
    own: Mapping[str, Thresholds] = field(default_factory=dict)

    def of(self, learner: str) -> Thresholds:
        """Return those of one learner."""
        return self.own.get(learner, self)

    def settings(self) -> SGTSettings:
        """As regime `sgt` has them."""
        return SGTSettings(success_above=self.success, failure_below=self.failure, gate=self.gate, pick=self.pick)


def successes(rollouts: Rollouts, thresholds: Thresholds, which: str) -> Bools:
    """Return whether each model solves each unit, shape (M, P): its first rollout does, or `any` of them."""
    above: Bools = rollouts.rewards_M_P_G > thresholds.success  # NaN is above nothing
    return np.asarray(above.any(axis=2)) if which == "any" else above[:, :, 0]


def complementarity(
    rollouts: Rollouts, thresholds: Thresholds, which: str, gates: Sequence[int], seed: int
) -> Complementarity:
    """`{"policies", "prompts", "success", "samples", "pairs", "pool", "buckets", "gate", "recommendation"}`; every rate
    with its 95 % bootstrap interval over prompts under the same name with `_ci`."""
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
        "graded": _graded(rollouts),
        "settings": advice["settings"],
        "extra_rows": advice["extra_rows"],
    }


def _samples(rollouts: Rollouts) -> dict[str, int]:
    counts = rollouts.present_M_P_G.sum(axis=2)
    return {name: int(counts[m].min()) for m, name in enumerate(rollouts.policies)}


def _pairs(policies: Sequence[str], solved: Bools, seed: int) -> list[PairRow]:
    """Return all ordered pairs; one set of resamples for all of them, in blocks that bound the memory."""
    couples = list(itertools.permutations(range(len(solved)), 2))
    rows: list[PairRow] = []
    for start in range(0, len(couples), PAIRS_AT_A_TIME):
        rows += _pair_rows(policies, solved, couples[start : start + PAIRS_AT_A_TIME], seed)
    return rows


def _pair_rows(policies: Sequence[str], solved: Bools, couples: list[tuple[int, int]], seed: int) -> list[PairRow]:
    units = solved.shape[1]
    learners, peers = solved[[a for a, _ in couples]], solved[[b for _, b in couples]]
    columns = np.concatenate([learners, peers, learners & peers]).T.astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        learner, peer, common = np.split(sums, 3, axis=1)
        overlap, rescue = ratio(common, learner + peer - common), ratio(peer - common, units - learner)
        return np.stack([learner / units, peer / units, overlap, rescue], axis=2).reshape(len(sums), -1)

    values = statistic(columns.sum(axis=0)[None])[0]
    around = intervals(columns, statistic, seed)
    rows = []
    for number, (a, b) in enumerate(couples):
        row: dict[str, Any] = {"learner": policies[a], "peer": policies[b]}
        for place, name in enumerate(PAIR_RATES, len(PAIR_RATES) * number):
            row |= {name: float(values[place]), f"{name}_ci": list(around[place])}
        rows.append(cast(PairRow, row))
    return rows


PAIRS_AT_A_TIME = 1000
PAIR_RATES = ("learner_success", "peer_success", "jaccard", "rescue")
POOL_RATES = ("mean", "any", "all", "exactly_one", "jaccard")


def _pool(solved: Bools, seed: int) -> PoolRates:
    by = solved.sum(axis=0)
    units = solved.shape[1]
    columns = np.stack([by / len(solved), by > 0, by == len(solved), by == 1], axis=1).astype(np.float64)

    def statistic(sums: Floats) -> Floats:
        return np.concatenate([sums / units, ratio(sums[:, 2], sums[:, 1])[:, None]], axis=1)

    values = statistic(columns.sum(axis=0)[None])[0]
    pool: dict[str, Any] = {}
    for name, value, interval in zip(POOL_RATES, values, intervals(columns, statistic, seed), strict=True):
        pool |= {name: float(value), f"{name}_ci": list(interval)}
    return cast(PoolRates, pool)


def _buckets(rollouts: Rollouts, solved: Bools) -> list[Bucket]:
    """Return units sorted by (mean reward over all models and rollouts, prompt id), cut in three."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    means = ratio(np.where(scored, rewards, 0.0).sum(axis=(0, 2)), scored.sum(axis=(0, 2)))
    height = np.where(np.isnan(means), -np.inf, means)  # nobody could be scored there: among the hard ones
    order = sorted(range(len(means)), key=lambda p: (height[p], rollouts.prompt_ids[p], rollouts.rounds[p]))
    rows: list[Bucket] = []
    for name, units in zip(BUCKETS[::-1], np.array_split(np.array(order, dtype=np.int64), len(BUCKETS)), strict=True):
        some = solved[:, units]
        rows.append(
            {
                "bucket": name,
                "prompts": len(units),
                "mean_reward": float(ratio(np.nansum(means[units]), (~np.isnan(means[units])).sum())),
                "jaccard": jaccard(some),
                "exactly_one": float(ratio((some.sum(axis=0) == 1).sum(), len(units))),
            }
        )
    return rows[::-1]


def gate_rate(rollouts: Rollouts, thresholds: Thresholds, learner: int, k: int) -> Floats:
    """Return G_n(x) = (1 - p_n)^K (1 - prod over peers of (1 - p_m)^K) of every unit, shape (P,).

    From counts: the learner's failures (below `failure`; with `gate: any`, that not all K are none), the peers'
    successes (above `success`). Products of estimates over independent rollouts: unbiased while K is at most the number
    of rollouts of each model, and at just that number the gate observed. An unscorable rollout is neither."""
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
    """Return SGT's gate over these rollouts, shape (P,): all own (or any) below `failure`, some peer's
    above `success`."""
    rule = thresholds.of(rollouts.policies[learner])
    own, present = rollouts.rewards_M_P_G[learner], rollouts.present_M_P_G[learner]
    failed = ((own < rule.failure) | ~present).all(axis=1) if rule.gate == "all" else (own < rule.failure).any(axis=1)
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
        first = m * (1 + len(gates))  # its columns: the gate observed, then one per K
        at: list[GateAt] = []
        for column, k in enumerate(gates, first + 1):
            rate, rate_ci = means[column], list(bounds[column])
            at.append({"k": k, "rate": rate, "rate_ci": rate_ci, "extrapolated": k > smallest})
        rows.append({"learner": name, "observed": means[first], "observed_ci": list(bounds[first]), "at": at})
    return rows


def _graded(rollouts: Rollouts) -> float:
    """Return the fraction of units whose pooled rewards are not all equal: where value sharing can change an
    advantage."""
    rewards = rollouts.rewards_M_P_G
    scored = ~np.isnan(rewards)
    highest = np.where(scored, rewards, -np.inf).max(axis=(0, 2))
    lowest = np.where(scored, rewards, np.inf).min(axis=(0, 2))
    return float((highest > lowest).mean())


def better_rate(rollouts: Rollouts) -> dict[str, float]:
    """Return by learner the share of units on which some peer's best reward exceeds the learner's: where SGT's
    `gate: relative` opens."""
    rates = {}
    for m, name in enumerate(rollouts.policies):
        own, peers = rollouts.rewards_M_P_G[m], rollouts.peer_rewards(m)
        best = np.where(np.isnan(own), -np.inf, own).max(axis=1)
        others = np.where(np.isnan(peers), -np.inf, peers).max(axis=1)
        rates[name] = float((np.isfinite(best) & (others > best)).mean())
    return rates


def _recommended(
    pool: PoolRates, gate: Sequence[GateRow], better: Mapping[str, float], rollouts: Rollouts, solved_at_all: Bools
) -> Recommendation:
    """Return a regime, or none, with its reason and its predicted cost. `solved_at_all`: by any rollout, shape (M, P).

    What decides: SGT's gate rate; where rewards are graded, how often a peer does better. Pooling whole batches (prp,
    hacpo, swarm) and sharing rewards alone (xgrpo) were not shown to help where SGT's gate stays shut, and some of
    their forms were shown to do harm (docs/study.md), so that they are not recommended from these figures.
    """
    prompts, group = len(rollouts.prompt_ids), max(_samples(rollouts).values())
    rates = ", ".join(f"{row['learner']} {row['observed']:.1%}" for row in gate)
    best = max(gate, key=lambda row: row["observed"])
    rewards = rollouts.rewards_M_P_G[~np.isnan(rollouts.rewards_M_P_G)]
    graded = len(np.unique(rewards)) > 2

    def advice(choice: str, text: str, opens: Sequence[float] = (), **settings: Any) -> Recommendation:
        extra = float(np.mean(opens)) / group if opens else 0.0
        cost = f"; at most {extra:.1%} more rows in the loss than GRPO has" if opens else ""
        return {
            "recommended": choice,
            "recommendation": f"{choice}{_assignments(settings)}: {text}{cost}",
            "settings": settings,
            "extra_rows": extra,
        }

    if not solved_at_all.any() and not graded:
        return advice("none", f"no model solved any of the {prompts} prompts; train or choose easier ones first")
    if pool["all"] == 1 and not graded:
        return advice("none", f"every model solves all {prompts} prompts; choose harder ones")
    if best["observed"] >= SPARSE and best["observed_ci"][0] > 0:
        text = f"its gate would open on {rates} of the prompts, where the learner fails and a peer does not"
        if shut := [row["learner"] for row in gate if row["observed"] < SPARSE]:
            text += f"; help goes one way: for {' and '.join(shut)} it would hardly open"
        return advice(at_level("outcome").name, text, [row["observed"] for row in gate])
    if graded and max(better.values()) >= SPARSE:
        found = ", ".join(f"{name} {rate:.1%}" for name, rate in better.items())
        text = f"no learner fails where a peer succeeds ({rates}), but a peer's best reward is above its own on {found}"
        return advice(at_level("outcome").name, text, list(better.values()), gate="relative")
    if best["observed"] >= SPARSE:
        text = f"SGT's gate opened on {rates} of {prompts} prompts, too few to tell from chance; give more (--prompts)"
        return advice("none", text)
    return advice("none", f"SGT's gate would hardly open ({rates}); these models solve the same prompts")


def _assignments(settings: Mapping[str, Any]) -> str:
    """Return settings as the command line takes them."""
    return "".join(f" --set regime.{key}={value}" for key, value in settings.items())
