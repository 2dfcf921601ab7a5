"""Do the checks before training predict the gain after? One point per policy of every pool that was run.

    python benchmarks/prediction.py            # benchmarks/results/prediction.json and .md

`mutualrl complementarity` recommends SGT where a learner often fails entirely while a peer (or a source) succeeds. For
each policy, the first table takes that rate over the first tenth of its SGT runs, and its gain: final greedy accuracy
under SGT minus that under GRPO, paired by seed. If recorded, the fit of the texts is added: the NLL per token of the
lessons. The second table takes what `complementarity --hints` found before training, and the gain of `hinted`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import harness
import sweep_results as sweeps
from mutualrl.console.markdown import table
from mutualrl.diagnostics.gates import SPARSE
from mutualrl.study.claims import difference
from mutualrl.study.outcomes import Outcomes
from mutualrl.study.statistics import Estimate, rank_correlation

#: results files, those of one study together, of runs with ten steps or more, which have a first tenth; of a policy in
#: several studies the one with most seeds counts, and in a tie the later one
STUDIES = (
    ("rivals", "rivals-recorded", "rivals-tiny"),
    ("one_model", "one_model_seeds", "one_model_chord"),
    ("hints_countdown",),
    ("hints", "hints_seeds"),
    ("served",),
    ("smol",),
    ("minimind_keep",),
    ("agents-trajectories", "agents-seeds"),
    ("study",),
    ("paper",),
    ("text_source",),
)
#: pools whose policies begin as the same models
MODELS = {
    "tiny-three": "tiny",
    "tiny-recorded": "tiny",
    "tiny-countdown": "text-source-pool",
    "served-pool": "tiny-hints",
}
REFERENCE = "grpo"
#: chosen after the gains were known: a description of them, no test
HIGH = 0.3


@dataclass(frozen=True, slots=True)
class Point:
    """One policy: gate rate at the start, gain with its 95 % interval, NLL of the lessons in nats per token."""

    study: str
    pool: str
    policy: str
    seeds: int
    gate: float
    gain: float
    low: float
    high: float
    lesson_nll: float | None


@dataclass(frozen=True, slots=True)
class HintPoint:
    """One policy: what hints did before training, and the gain of `hinted` with its 95 % interval."""

    study: str
    pool: str
    policy: str
    seeds: int
    success_with: float
    success_without: float
    learnable: float
    gain: float
    low: float
    high: float


P = TypeVar("P", Point, HintPoint)


def outcomes_of(study: Sequence[str]) -> Outcomes:
    """Return the outcomes in the results files of a study that exist."""
    stored = [sweeps.outcomes_of(sweeps.stored(name)) for name in study if sweeps.has_results(name)]
    return Outcomes([outcome for each in stored for outcome in each.by.values()])


def gains(outcomes: Outcomes, pool: str, arm: str) -> dict[str, Estimate]:
    """Return an arm's final accuracy minus GRPO's by policy, paired by seed; empty if the pool has not both."""
    found = {name: difference(outcomes, pool, arm, REFERENCE, "accuracy", name) for name in outcomes.policies(pool)}
    return {name: gain for name, gain in found.items() if gain is not None}


def points(study: str, outcomes: Outcomes) -> list[Point]:
    """Return a point for each policy of each pool that ran SGT and GRPO and recorded its gate."""
    result = []
    for pool in outcomes.pools:
        for policy, gain in gains(outcomes, pool, "sgt").items():
            runs = [outcomes.by[pool, "sgt", seed].policies[policy] for seed in outcomes.seeds(pool, "sgt", REFERENCE)]
            if not all(run.gate for run in runs):
                continue
            gate = statistics.fmean(run.gate[0] for run in runs)
            nll = [run.lesson_nll for run in runs if run.lesson_nll is not None]
            fit = statistics.fmean(nll) if nll else None
            place = (study, Path(pool).stem, policy, gain.n)
            result.append(Point(*place, gate, gain.mean, gain.low, gain.high, fit))
    return result


def hint_points(study: str, outcomes: Outcomes) -> list[HintPoint]:
    """Return a point for each policy whose hints were tried before training and that ran `hinted` and GRPO."""
    tried = sweeps.stored("hints_prediction")["pools"]
    result = []
    for pool in outcomes.pools:
        rows = {row["learner"]: row for row in tried.get(pool, {}).get("hints", ())}
        for policy, gain in gains(outcomes, pool, "hinted").items() if rows else ():
            row = rows[policy]
            rates = (row["success_with"], row["success_without"], row["learnable"])
            result.append(HintPoint(study, pool, policy, gain.n, *rates, gain.mean, gain.low, gain.high))
    return result


def most_seeds(points: Sequence[P]) -> list[P]:
    """Return a point for each policy of each pool: the one with most seeds, in a tie the later one."""
    chosen: dict[tuple[str, str], P] = {}
    for point in points:
        key = point.pool, point.policy
        if key not in chosen or chosen[key].seeds <= point.seeds:
            chosen[key] = point
    return sorted(chosen.values(), key=lambda point: (point.pool, point.policy))


def rho(policies: Sequence[Point]) -> tuple[float, float, float] | None:
    """Return Spearman's rank correlation of gate rate and gain, its interval over the groups of models."""
    clusters = [MODELS.get(point.pool, point.pool) for point in policies]
    return rank_correlation([point.gate for point in policies], [point.gain for point in policies], clusters)


def markdown(
    policies: Sequence[Point], hints: Sequence[HintPoint], correlation: tuple[float, float, float] | None
) -> str:
    """Return both tables, the rank correlation and where the advice misled."""
    rows = []
    for point in policies:
        fit = "" if point.lesson_nll is None else f"{point.lesson_nll:.2f}"
        rows.append([point.pool, point.policy, str(point.seeds), f"{point.gate:.2f}", interval(point), fit])
    head = ["pool", "policy", "seeds", "gate rate at the start", "SGT minus GRPO", "NLL of the lessons"]
    parts = [table("SGT's gain beside the gate rate at the start", head, rows)]
    if correlation is not None:
        groups = len({MODELS.get(point.pool, point.pool) for point in policies})
        parts.append(
            f"Spearman's rho over {len(policies)} policies: {correlation[0]:+.3f} "
            f"[{correlation[1]:+.3f}, {correlation[2]:+.3f}], interval from resampling the {groups} groups of models."
        )
    misled = [f"{point.policy} of {point.pool}" for point in policies if point.gate >= SPARSE and point.high < 0]
    high = [point for point in policies if point.gate >= HIGH]
    low = [point for point in policies if point.gate < HIGH]
    parts.append(
        f"Recommended (a rate of {SPARSE:.1%} or more) and below GRPO by the interval: {', '.join(misled) or 'none'}."
    )
    parts.append(
        f"Mean gain above 0: {above(high)} of {len(high)} policies with a rate of {HIGH} or more, {above(low)} of "
        f"{len(low)} with less; the bound was chosen after the gains were known."
    )
    rows = []
    for tried in hints:
        rates = (f"{tried.success_with:.2f}", f"{tried.success_without:.2f}", f"{tried.learnable:.2f}")
        rows.append([tried.pool, tried.policy, str(tried.seeds), *rates, interval(tried)])
    head = ["pool", "policy", "seeds", "solved with the hint", "without", "learnable", "hinted minus GRPO"]
    parts.append(table("Hinted's gain beside what hints did before training", head, rows))
    return "\n\n".join(parts)


def interval(point: Point | HintPoint) -> str:
    """Return a gain with its interval."""
    return sweeps.interval(point.gain, point.low, point.high)


def above(policies: Sequence[Point]) -> int:
    """Return how many gains are above 0."""
    return sum(point.gain > 0 for point in policies)


def main() -> None:
    """Read the results files, and write the tables."""
    parser = harness.options(__doc__)
    args = harness.parse(parser)
    studies = {study[0]: outcomes_of(study) for study in STUDIES}
    policies = most_seeds([point for name, outcomes in studies.items() for point in points(name, outcomes)])
    hints = most_seeds([point for name, outcomes in studies.items() for point in hint_points(name, outcomes)])
    correlation = rho(policies)
    content = {
        "command": "python benchmarks/prediction.py",
        "points": [asdict(point) for point in policies],
        "rho": None if correlation is None else dict(zip(("mean", "low", "high"), correlation, strict=True)),
        "hints": [asdict(point) for point in hints],
    }
    harness.write(args.out, "prediction", content, markdown(policies, hints, correlation))


if __name__ == "__main__":
    main()
