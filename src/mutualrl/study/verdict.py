"""Verdicts on runs, in a few sentences: the first part of a report."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mutualrl.process.plugins import is_import_path
from mutualrl.process.status import RunState
from mutualrl.recipes.agreement import few_held_out
from mutualrl.regimes import baseline
from mutualrl.regimes.sgt import SGT
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.page import Verdict
from mutualrl.runs.facts import cost_of_source
from mutualrl.runs.logs import LoggedRun
from mutualrl.runs.record import Run
from mutualrl.study.statistics import MIN_VALUES, paired
from mutualrl.study.sweep_directory import in_sweep


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return for each comparison its result, how certain that is, and the commands that would decide more."""
    results: list[Verdict] = []
    for comparison in comparisons:
        if len(comparison.runs) == 1:
            run = comparison.runs[0]
            results.append(replace(_of_one(run), dead=dead_of_run(run)))
        else:
            first, *others = _of_several(comparison)
            results += [replace(first, dead=dead_by_arm(comparison)), *others]
    return results


def dead_of_run(run: LoggedRun) -> list[str]:
    """Return what happened to the prompts without a reward above 0 in their last group: one sentence per policy that
    counted them, and one per source that was asked, with what it cost."""
    sentences = []
    for policy in run.policies:
        facts = run.facts(policy)
        if facts.dead is None:
            continue
        teaches = facts.taught or run.rule.metric("rescues") is not None
        lessons = f"; it was taught {facts.taught:,} texts in all" if teaches else ""
        sentences.append(
            f"{policy}: {facts.dead:,} dead at the end, {facts.most_dead:,} at most; {facts.revived:,} times a dead "
            f"one had a success again{lessons}."
        )
    for name in run.info.asked_sources:
        cost = run.source_facts(name)
        if cost.asked:
            sentences.append(cost_of_source(name, cost))
    return sentences


def dead_by_arm(comparison: Comparison) -> list[str]:
    """Return the dead prompts of each arm at the end, a mean over the policies of its finished runs."""
    sentences = []
    for arm, runs in comparison.arms.items():
        ended = [run for run in runs if run.state == RunState.FINISHED]
        counts = [run.facts(policy).dead for run in ended for policy in run.policies]
        last = [count for count in counts if count is not None]
        if last:
            sentences.append(f"{arm}: {statistics.fmean(last):,.1f} dead at the end (mean over policies and runs).")
    kinds = {run.resample is not None for runs in comparison.arms.values() for run in runs}
    if len(kinds) > 1 and sentences:
        sentences.append(
            "Dynamic sampling samples more prompts per round and counts the dead ones among them: its number is not to "
            "be compared with one without."
        )
    return sentences


def _of_one(run: LoggedRun) -> Verdict:
    final = run.accuracy
    if run.state == RunState.RUNNING:
        return Verdict(f"{run.name} is running: no result yet.", (), (f"mutualrl watch {_quoted(run)}",))
    if run.state == RunState.FINISHED and run.info.scripts:
        return Verdict(f"{run.name} was trained by scripts, which measure no accuracy: the gain is unknown.", (), ())
    if run.state != RunState.FINISHED and run.info.scripts:
        return Verdict(f"{run.name} has not finished ({run.state}): no result yet.", (), ())
    if run.state != RunState.FINISHED:
        again = (f"mutualrl train --resume --run-dir {_quoted(run)}",) if run.is_local else ()
        return Verdict(f"{run.name} has not finished ({run.state}): no result yet.", (), again)
    if final is None:
        missing = [name for name, policy in run.policies.items() if policy.final is None]
        answer = f"{run.name} has no result of {', '.join(missing) or 'its policies'} here: the pool's gain is unknown."
        return Verdict(answer, (), ())
    first = [measured[0] for name in run.policies if 0 in (measured := run.accuracy_of(name)).index]
    began = f" from {statistics.fmean(first):.3f}" if len(first) == len(run.policies) else ""
    moved = f"{_measure([run]).capitalize()} went{began} to {final:.3f} (greedy{_averaged([run])}{_problems([run])})."
    if run.arm == baseline().name:
        if len(run.policies) == 1 and not run.setting("sources"):
            (alone,) = run.policies
            answer = f"{moved} {alone} trained alone: there is nobody to share with, no other policy and no source."
            return Verdict(answer, _few([run]), ())
        other = SGT.name
        answer = f"{moved} This is a baseline: train the same recipe with a regime that shares, and compare the two."
    else:
        other = baseline().name
        gain = "the gain of sharing" if len(run.policies) > 1 else f"what {' and '.join(run.sources) or run.arm} gave"
        answer = f"{moved} One run does not show {gain}: it has no baseline. Train the same recipe without it."
    directory = f"{run.root}-{other}"
    commands = _again(run, regime=other, directory=directory)
    if commands:
        commands = (*commands, f"mutualrl report {_quoted(run)} {shlex.quote(directory)}")
    return Verdict(
        answer,
        (f"One seed has no interval: {MIN_VALUES} or more per arm show how certain a gain is.", *_few([run])),
        commands,
    )


def _of_several(comparison: Comparison) -> list[Verdict]:
    by_arm: dict[str, dict[int, float]] = {}
    for arm, runs in comparison.arms.items():
        ended = [(run.seed, run.accuracy) for run in runs if run.state == RunState.FINISHED]
        by_arm[arm] = {seed: value for seed, value in ended if type(seed) is int and value is not None}
    plain = by_arm.get(baseline().name)
    if not plain:
        run = comparison.runs[0]
        directory = f"{run.root}-{baseline().name}"
        answer = f"{comparison.name}: no finished run of the baseline ({baseline().name}), so no gain can be measured."
        return [Verdict(answer, (), _again(run, regime=baseline().name, directory=directory))]
    results = []
    for arm, finals in by_arm.items():
        if arm != baseline().name:
            results.append(_difference(comparison, arm, finals, plain))
    return results or [Verdict(f"{comparison.name}: every run is a baseline; train one with sharing.", (), ())]


def _difference(comparison: Comparison, arm: str, finals: dict[int, float], plain: dict[int, float]) -> Verdict:
    """Return the verdict on an arm against the baseline, paired by seed; it claims no more than the interval shows."""
    seeds = [seed for seed in finals if seed in plain]
    members = comparison.arms[arm]
    if not seeds:
        return Verdict(
            f"{comparison.name}: {arm} and {baseline().name} have no finished runs with a common seed.", (), ()
        )
    count = _count(members)
    resolution = 1 / count if count else 0.0
    estimate = paired([finals[seed] for seed in seeds], [plain[seed] for seed in seeds], resolution=resolution)
    change = f"{estimate.mean:+.3f} in {_measure(members)} (greedy{_averaged(members)}{_problems(members)})"
    cautions = list(_few(members))
    if any(note.startswith("not matched") for note in comparison.notes):
        cautions.append("The arms differ in more than the regime: see the notes in the section below.")
    decided = estimate.reading != "not decided"
    if estimate.n < MIN_VALUES:
        answer = (
            f"{arm} minus {baseline().name}: {change}, seeds: {estimate.n}; {MIN_VALUES} are needed for an interval."
        )
    else:
        result = f"{arm} ended {estimate.reading} {baseline().name}" if decided else estimate.reading
        interval = f"[{estimate.low:+.3f}, {estimate.high:+.3f}]"
        answer = f"{arm} minus {baseline().name}: {change}, 95 % interval {interval}, {estimate.n} seeds: {result}."
    commands: tuple[str, ...] = ()
    if not decided and not _few(members):  # else more seeds are no help
        both = (*comparison.arms[baseline().name], *members)
        unused = 1 + max(run.seed for run in both if type(run.seed) is int)
        cautions.append("More seeds would narrow it; a sweep file runs many (mutualrl sweep).")
        pair = [comparison.arms[baseline().name][0], members[0]]
        for run in pair:
            commands += _again(run, seed=unused, directory=f"{run.root}-{unused}")
    return Verdict(f"{comparison.name}: {answer}", tuple(cautions), commands)


def _few(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the caution about a result on a few held-out problems; none for enough of them."""
    count = _count(runs)
    unrecorded = {"validation": {"used": count, "prompts": count}}
    notes = (few_held_out(run.info.data or unrecorded) for run in runs)
    return tuple(f"{note}." for note in notes if note is not None)[:1]


def _count(runs: Sequence[Run]) -> int | None:
    """Return the number of held-out problems that the policies are evaluated on; None if it is not recorded."""
    for run in runs:
        for policy in run.policies.values():
            if policy.validation is not None and policy.validation.n > 0:
                return policy.validation.n
    return None


def _measure(runs: Sequence[Run]) -> str:
    """Return the name of the held-out measure: with custom reward functions there is no accuracy."""
    validations = [policy.validation for run in runs for policy in run.policies.values()]
    return "mean reward" if any(each is not None and each.no_box is None for each in validations) else "accuracy"


def _averaged(runs: Sequence[Run]) -> str:
    return ", mean of the pool" if any(len(run.policies) > 1 for run in runs) else ""


def _problems(runs: Sequence[Run]) -> str:
    count = _count(runs)
    return f", {count} problems" if count else ""


#: flags of `train` that are specific to one run, and those of them with a value
ONCE = ("--resume", "--clean", "--dry-run", "--json", "--push-to-hub")
WITH_VALUE = ("--push-to-hub",)


def _again(run: Run, *, directory: str, regime: str | None = None, seed: int | None = None) -> tuple[str, ...]:
    """Return the command that repeats a run with another regime or seed in another directory; empty if it could not
    run, if it would write into a sweep's directory, or would run code named in a command from another machine."""
    if (
        not run.is_local
        or Path(directory).exists()
        or in_sweep(run.root)
        or (regime is not None and run.has_own_settings)
    ):
        return ()
    changed = {"--run-dir": directory}
    if regime is not None:
        changed["--regime"] = regime
    if seed is not None:
        changed["--seed"] = str(seed)
    repeated = ["mutualrl", "train"]
    rest = iter(run.info.command[2:])
    for word in rest:
        name, equals, value = word.partition("=")
        if name in changed or name in ONCE:
            if not equals and (name in changed or name in WITH_VALUE):
                next(rest, None)
        elif name == "--set":
            assignment = value if equals else next(rest, "")
            if not _replaced(assignment, changed):
                repeated += ["--set", assignment]
        else:
            repeated.append(word)
    if any("trust" in word or is_import_path(word.rpartition("=")[2]) for word in repeated):
        return ()
    return (shlex.join([*repeated, *(word for pair in changed.items() for word in pair)]),)


def _replaced(assignment: str, changed: Mapping[str, str]) -> bool:
    """Return whether an assignment of `--set` is to something that changes: the regime, whose keys another one does
    not have, the seed, or the directory."""
    key = assignment.partition("=")[0]
    regime = key == "regime" or key.startswith("regime.") or (key.startswith("policies.") and ".regime" in key)
    return ("--regime" in changed and regime) or (key == "run.seed" and "--seed" in changed) or key == "run.dir"


def _quoted(run: Run) -> str:
    return shlex.quote(str(run.root))
