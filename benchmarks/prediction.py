"""Does the initial gate rate predict SGT's gain? One point per policy of every available sweep.

    python benchmarks/prediction.py            # benchmarks/results/prediction.json and .md

`mutualrl complementarity` recommends SGT where a learner often fails entirely while a peer succeeds. For each policy,
this takes that rate over the first tenth of its SGT runs, and its gain: final greedy accuracy under SGT minus that
under GRPO, paired by seed. If recorded, the fit of the peers' texts is added: the NLL per token of the lessons.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import sweep_results as sweeps
from mutualrl.console.markdown import table
from mutualrl.study.outcomes import Outcomes
from mutualrl.study.statistics import Estimate, correlation, paired

#: results files; for a policy in several, the one with most seeds counts, and in a tie the later one
SOURCES = ("study", "paper", "text_source")
ARM, BASELINE = "sgt", "grpo"


@dataclass(frozen=True, slots=True)
class Point:
    """One policy: gate rate at the start, gain with its 95 % interval, NLL of the lessons in nats per token."""

    source: str
    pool: str
    policy: str
    seeds: int
    gate: float
    gain: float
    low: float
    high: float
    lesson_nll: float | None


def points(source: str, outcomes: Outcomes) -> list[Point]:
    """Return a point for each policy of each pool that has both arms."""
    result = []
    for pool in outcomes.pools:
        seeds = outcomes.seeds(pool, ARM, BASELINE)
        for policy in outcomes.policies(pool) if seeds else ():
            gain = difference(outcomes, pool, seeds, policy)
            runs = [outcomes.by[pool, ARM, seed].policies[policy] for seed in seeds]
            nll = [run.lesson_nll for run in runs if run.lesson_nll is not None]
            result.append(
                Point(
                    source,
                    Path(pool).stem,
                    policy,
                    len(seeds),
                    statistics.fmean(run.gate[0] for run in runs),
                    gain.mean,
                    gain.low,
                    gain.high,
                    statistics.fmean(nll) if nll else None,
                )
            )
    return result


def difference(outcomes: Outcomes, pool: str, seeds: list[int], policy: str) -> Estimate:
    """Return SGT's final accuracy minus GRPO's, paired by seed."""
    arm = outcomes.by_seed(pool, ARM, seeds, "accuracy", policy)
    baseline = outcomes.by_seed(pool, BASELINE, seeds, "accuracy", policy)
    assert arm is not None
    assert baseline is not None
    return paired(arm, baseline, resolution=outcomes.resolution(pool, "accuracy", 64))


def most_seeds(points: list[Point]) -> list[Point]:
    """Return a point for each policy of each pool: the one with most seeds, in a tie the later one."""
    chosen: dict[tuple[str, str], Point] = {}
    for point in points:
        key = point.pool, point.policy
        if key not in chosen or chosen[key].seeds <= point.seeds:
            chosen[key] = point
    return list(chosen.values())


def markdown(policies: list[Point], r: tuple[float, float, float] | None) -> str:
    """Return the table and the correlation below it."""
    rows = []
    for point in policies:
        gain = f"{point.gain:+.3f} [{point.low:+.3f}, {point.high:+.3f}]"
        rows.append(
            [
                point.pool,
                point.policy,
                str(point.seeds),
                f"{point.gate:.2f}",
                gain,
                "" if point.lesson_nll is None else f"{point.lesson_nll:.2f}",
            ]
        )
    head = ["pool", "policy", "seeds", "gate rate at the start", "SGT minus GRPO", "NLL of the lessons"]
    text = table("SGT's gain beside the gate rate at the start", head, rows)
    if r is None:
        return text
    return f"{text}\n\nPearson's r over {len(policies)} policies: {r[0]:+.3f} [{r[1]:+.3f}, {r[2]:+.3f}]."


def main() -> None:
    """Read the results files, and write the table."""
    parser = harness.options(__doc__)
    args = harness.parse(parser)
    all_points: list[Point] = []
    for name in SOURCES:
        if sweeps.has_results(name):
            all_points += points(name, sweeps.outcomes_of(sweeps.stored(name)))
    policies = most_seeds(all_points)
    r = correlation([point.gate for point in policies], [point.gain for point in policies])
    content = {
        "command": "python benchmarks/prediction.py",
        "points": [asdict(point) for point in policies],
        "r": None if r is None else dict(zip(("mean", "low", "high"), r, strict=True)),
    }
    harness.write(args.out, "prediction", content, markdown(policies, r))


if __name__ == "__main__":
    main()
