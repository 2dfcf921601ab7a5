"""What runs came to, in a few sentences: the first thing that a report says."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence

from mutualrl.regimes import at_level, baseline
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.page import Verdict
from mutualrl.reporting.run_reader import Run, part
from mutualrl.study.statistics import FEWEST, Estimate

RUNNING = "running"
FINISHED = "finished"


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return what each comparison shows, how certain that is, and the commands that would tell more."""
    results: list[Verdict] = []
    for comparison in comparisons:
        results += [_of_one(comparison.runs[0])] if len(comparison.runs) == 1 else _of_several(comparison)
    return results


def pool_accuracy(run: Run) -> float | None:
    """Return the mean over the policies of greedy accuracy at the end; None where a policy has none."""
    finals = [policy.final for policy in run.policies.values()]
    known = [value for value in finals if value is not None]
    return statistics.fmean(known) if known and len(known) == len(finals) else None


def _of_one(run: Run) -> Verdict:
    final = pool_accuracy(run)
    if run.state == RUNNING:
        return Verdict(f"{run.name} is running: no result yet.", (), (f"mutualrl runs watch {_quoted(run)}",))
    if run.state != FINISHED or final is None:
        again = f"mutualrl train --resume --run-dir {_quoted(run)}"
        return Verdict(f"{run.name} has not finished ({run.state}): no result yet.", (), (again,))
    first = [
        points[0].value for policy in run.policies.values() if (points := policy.accuracy()) and not points[0].step
    ]
    began = f" from {statistics.fmean(first):.3f}" if len(first) == len(run.policies) else ""
    moved = f"Accuracy went{began} to {final:.3f} (greedy, mean of the pool{_problems([run])})."
    if run.arm == baseline().name:
        other = at_level("outcome").name
        answer = f"{moved} This is a baseline: train the same with a regime that shares, and compare the two."
    else:
        other = baseline().name
        answer = (
            f"{moved} What sharing gained cannot be told from one run: it has no baseline. Train the same without it."
        )
    there = f"{run.root}-{other}"
    commands = (_again(run, regime=other, directory=there), f"mutualrl report {_quoted(run)} {shlex.quote(there)}")
    return Verdict(
        answer, (f"One seed has no interval: {FEWEST} or more of each arm say how certain a gain is.",), commands
    )


def _of_several(comparison: Comparison) -> list[Verdict]:
    by_arm: dict[str, dict[int | None, float]] = {}
    for arm, runs in comparison.arms.items():
        ended = [(run.seed, pool_accuracy(run)) for run in runs if run.state == FINISHED]
        by_arm[arm] = {seed: value for seed, value in ended if value is not None}
    plain = by_arm.get(baseline().name)
    if not plain:
        run = comparison.runs[0]
        there = f"{run.root}-{baseline().name}"
        answer = f"{comparison.name}: no finished run of the baseline ({baseline().name}): no gain can be told."
        return [Verdict(answer, (), (_again(run, regime=baseline().name, directory=there),))]
    results = []
    for arm, finals in by_arm.items():
        if arm != baseline().name:
            results.append(_difference(comparison, arm, finals, plain))
    return results or [Verdict(f"{comparison.name}: every run is of the baseline; train one with sharing.", (), ())]


def _difference(
    comparison: Comparison, arm: str, finals: dict[int | None, float], plain: dict[int | None, float]
) -> Verdict:
    """Return how an arm ended against the baseline, paired by seed; the words say no more than the interval does."""
    seeds = [seed for seed in finals if seed in plain]
    members = comparison.arms[arm]
    if not seeds:
        return Verdict(f"{comparison.name}: {arm} and {baseline().name} have no finished runs of one seed.", (), ())
    count = _count(members)
    estimate = Estimate.of([finals[s] - plain[s] for s in seeds], resolution=1 / count if count else 0.0)
    what = f"{estimate.mean:+.3f} of the held-out problems (greedy, mean of the pool{_problems(members)})"
    cautions = []
    if any(note.startswith("not matched") for note in comparison.notes):
        cautions.append("The arms differ in more than the regime: the notes of the section below say in what.")
    decided = estimate.n >= FEWEST and not estimate.low <= 0 <= estimate.high
    if estimate.n < FEWEST:
        answer = f"{arm} minus {baseline().name}: {what}, seeds: {estimate.n}; {FEWEST} are needed for an interval."
    else:
        words = "not decided"
        if decided:
            words = f"{arm} ended {'above' if estimate.low > 0 else 'below'} {baseline().name}"
        interval = f"[{estimate.low:+.3f}, {estimate.high:+.3f}]"
        answer = f"{arm} minus {baseline().name}: {what}, 95 % interval {interval}, {estimate.n} seeds: {words}."
    commands: tuple[str, ...] = ()
    if not decided:
        unused = max(seed for seed in seeds if seed is not None) + 1 if any(s is not None for s in seeds) else 1
        cautions.append("More seeds would narrow it; a sweep file runs many (mutualrl sweep).")
        pair = [comparison.arms[baseline().name][0], members[0]]
        commands = tuple(_again(run, seed=unused, directory=f"{run.root}-{unused}") for run in pair)
    return Verdict(f"{comparison.name}: {answer}", tuple(cautions), commands)


def _count(runs: Sequence[Run]) -> int | None:
    """Return on how many held-out problems the policies are measured, where the results say so."""
    for run in runs:
        for policy in run.policies.values():
            count = part(policy.result or {}, "validation").get("n")
            if isinstance(count, int) and count > 0:
                return count
    return None


def _problems(runs: Sequence[Run]) -> str:
    count = _count(runs)
    return f", {count} problems" if count else ""


def _again(run: Run, *, directory: str, regime: str | None = None, seed: int | None = None) -> str:
    """Return the command of a run with another regime or seed, into another directory."""
    words = [str(word) for word in run.info.get("command") or ()] or ["mutualrl", "train"]
    changed = {"--run-dir": directory}
    if regime is not None:
        changed["--regime"] = regime
    if seed is not None:
        changed["--seed"] = str(seed)
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in changed:
            skip = not equals
        elif not (regime is not None and _sets_regime(kept, word)):
            kept.append(word)
        else:
            kept.pop()  # the --set before it
    return shlex.join([*kept, *(part for pair in changed.items() for part in pair)])


def _sets_regime(before: Sequence[str], word: str) -> bool:
    """Return whether a word is the assignment of a `--set` of a regime's key, which another regime does not have."""
    return bool(before) and before[-1] == "--set" and word.startswith("regime.")


def _quoted(run: Run) -> str:
    return shlex.quote(str(run.root))
