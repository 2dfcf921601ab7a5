"""Verdicts on runs: a word, a number and its certainty, the first part of a report."""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mutualrl.console.display import counted, times
from mutualrl.process.plugins import is_import_path
from mutualrl.process.status import RunState
from mutualrl.recipes.agreement import few_held_out
from mutualrl.regimes import baseline
from mutualrl.regimes.sgt import SGT
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.page import Dead, Verdict, Word
from mutualrl.runs.facts import cost_of_source
from mutualrl.runs.logs import LoggedRun
from mutualrl.runs.record import Run, measure_of
from mutualrl.storage.metrics import DEAD, RESAMPLE_ATTEMPTS
from mutualrl.study.statistics import MIN_VALUES, paired
from mutualrl.study.sweep_directory import in_sweep

#: results in the order of a table: what hurt first
ORDER = ("Hurt", "Not decided", "Helped")


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Return for each comparison its result, how certain that is, and the commands that would decide more: those that
    hurt first, then those not decided, then those that helped, then those without a baseline or a result."""
    results: list[Verdict] = []
    for comparison in comparisons:
        if len(comparison.runs) == 1:
            run = comparison.runs[0]
            results.append(replace(_of_one(run), dead=dead_of_run(run), costs=costs_of_run(run)))
        else:
            results += _of_several(comparison)
    return sorted(results, key=lambda verdict: (*ORDER, verdict.word).index(verdict.word))


def dead_of_run(run: LoggedRun) -> list[Dead]:
    """Return what happened to the prompts without a reward above 0 in their last group, of each policy that counted
    them: also how many came back, and how many texts it was taught."""
    counts = []
    for policy in run.policies:
        facts = run.facts(policy)
        if facts.dead is None or facts.most_dead is None or facts.first_dead is None:
            continue
        words = f"came back {times(facts.revived)}" if _sampled_twice(run, policy) else "no prompt came a second time"
        if facts.taught is not None:
            words += f"; taught {counted(facts.taught, 'text')}"
        counts.append(Dead(policy, facts.first_dead, facts.most_dead, facts.dead, words))
    return counts


def _sampled_twice(run: LoggedRun, policy: str) -> bool:
    """Return whether a policy sampled more prompts than the data has, so that some came again; True if not known."""
    plan = run.info.fingerprint
    batches = len(run.series(policy, DEAD.key)) + run.total(policy, RESAMPLE_ATTEMPTS.key)
    return not 0 < batches * int(plan.get("prompts_per_round", 0)) <= int(plan.get("prompts", 0))


def costs_of_run(run: LoggedRun) -> list[str]:
    """Return what each source that was asked cost and gave."""
    costs = ((name, run.source_facts(name)) for name in run.info.asked_sources)
    return [cost_of_source(name, cost, teaches=run.rule.teaches) for name, cost in costs if cost.asked]


def dead_by_arm(comparison: Comparison) -> dict[str, Dead]:
    """Return the dead prompts of each arm that counted them, means over the policies of its finished runs."""
    by_arm = {}
    for arm, runs in comparison.arms.items():
        ended = [run for run in runs if run.state == RunState.FINISHED]
        facts = [run.facts(policy) for run in ended for policy in run.policies]
        known = [each for each in facts if each.dead is not None]
        if known:
            first, most, last = (
                statistics.fmean(getattr(each, key) for each in known) for key in ("first_dead", "most_dead", "dead")
            )
            by_arm[arm] = Dead(arm, first, most, last, "mean per policy and run")
    return by_arm


def _with_dead(verdict: Verdict, comparison: Comparison, dead: Mapping[str, Dead]) -> Verdict:
    """Return a verdict with the dead prompts of arms, and a caution where they are not to be compared."""
    kinds = {run.resample is not None for arm in dead for run in comparison.arms[arm]}
    unlike = (
        "Dynamic sampling samples more prompts per round and counts the dead ones among them: its number is not to be "
        "compared with one without."
    )
    cautions = (*verdict.cautions, unlike) if len(kinds) > 1 else verdict.cautions
    return replace(verdict, dead=list(dead.values()), cautions=cautions)


def _of_one(run: LoggedRun) -> Verdict:
    final = run.accuracy
    if run.state == RunState.RUNNING:
        watch = f"mutualrl watch {_quoted(run)}"
        return Verdict("No result yet", run.name, f"{run.name} is running.", commands=(watch,))
    if run.state == RunState.FINISHED and run.info.scripts:
        answer = (
            f"{run.name} was trained by scripts, which measure no accuracy: the gain is unknown. Evaluate the models "
            "that they saved on held-out rows, beside those that they began with."
        )
        models = " ".join(f"--model SAVED_MODEL_OF_{name.upper()}" for name in run.policies)
        return Verdict(
            "Not measured", run.name, answer, commands=(f"mutualrl eval {models} --suite dataset --data HELD_OUT_ROWS",)
        )
    if run.state != RunState.FINISHED:
        resume = f"mutualrl train --resume --run-dir {_quoted(run)}"
        commands = (resume,) if run.is_local and not run.info.scripts else ()
        state = "killed, or on another machine" if run.state == RunState.ENDED else str(run.state)
        return Verdict("No result yet", run.name, f"{run.name} has not finished ({state}).", commands=commands)
    if final is None:
        missing = [name for name, policy in run.policies.items() if policy.final is None]
        answer = f"{run.name} has no result of {', '.join(missing) or 'its policies'} here: the pool's gain is unknown."
        return Verdict("Not measured", run.name, answer)
    first = [measured[0] for name in run.policies if 0 in (measured := run.accuracy_of(name)).index]
    began = f"{statistics.fmean(first):.3f} → " if len(first) == len(run.policies) else ""
    number, basis = f"{began}{final:.3f}", f"{_basis([run])}; one seed"
    few = _few([run])
    if run.arm == baseline().name:
        if len(run.policies) == 1 and not run.setting("sources"):
            (alone,) = run.policies
            answer = f"{alone} trained alone: there is nobody to share with, no other policy and no source."
            return Verdict("Baseline only", run.name, answer, number, basis=basis, cautions=few)
        other = SGT.name
        others = [str(part.get("name")) for part in run.setting("sources") or () if isinstance(part, dict)]
        learns = "that shares" if len(run.policies) > 1 else f"that learns from {' and '.join(others)}"
        answer = f"This is a baseline: train the same recipe with a regime {learns}, and compare the two."
    else:
        other = baseline().name
        shares = len(run.policies) > 1 and run.rule.shares
        gain = "the gain of sharing" if shares else f"what {' and '.join(run.sources) or run.arm} gave"
        answer = f"One run does not show {gain}: it has no baseline. Train the same recipe without it."
    word: Word = "No baseline yet" if other == baseline().name else "Baseline only"
    directory = f"{run.root}-{other}"
    again = [*_again(run, regime=other, directory=directory)]
    if again:
        again.append(f"mutualrl report {_quoted(run)} {shlex.quote(directory)}")
    seeds = f"One seed has no interval: {MIN_VALUES} or more per arm show how certain a gain is."
    return Verdict(word, run.name, answer, number, basis=basis, cautions=(seeds, *few), commands=again)


def _of_several(comparison: Comparison) -> list[Verdict]:
    by_arm: dict[str, dict[int, float]] = {}
    for arm, runs in comparison.arms.items():
        ended = [(run.seed, run.accuracy) for run in runs if run.state == RunState.FINISHED]
        by_arm[arm] = {seed: value for seed, value in ended if type(seed) is int and value is not None}
    plain = by_arm.get(baseline().name)
    dead = dead_by_arm(comparison)
    baselines = comparison.arms.get(baseline().name, ())
    if not plain and any(run.state == RunState.FINISHED for run in baselines):
        answer = f"The finished runs of {baseline().name} have no accuracy here, so no gain can be measured."
        return [_with_dead(Verdict("Not measured", comparison.name, answer), comparison, dead)]
    if not plain:
        run = comparison.runs[0]
        directory = f"{run.root}-{baseline().name}"
        answer = f"No finished run of the baseline ({baseline().name}), so no gain can be measured."
        commands = _again(run, regime=baseline().name, directory=directory)
        return [_with_dead(Verdict("No baseline yet", comparison.name, answer, commands=commands), comparison, dead)]
    results = []
    for arm, finals in by_arm.items():
        if arm != baseline().name:
            pair = {name: dead[name] for name in (baseline().name, arm) if name in dead}
            results.append(_with_dead(_difference(comparison, arm, finals, plain), comparison, pair))
    if len(results) > 1:
        many = f"{len(results)} arms are compared: the intervals are not corrected for their number."
        results = [replace(verdict, cautions=(*verdict.cautions, many)) for verdict in results]
    alone = Verdict("Baseline only", comparison.name, "Every run is a baseline; train one with sharing.")
    return results or [_with_dead(alone, comparison, dead)]


def _difference(comparison: Comparison, arm: str, finals: dict[int, float], plain: dict[int, float]) -> Verdict:
    """Return the verdict on an arm against the baseline, paired by seed; it claims no more than the interval shows."""
    subject = f"{arm} against {baseline().name} ({comparison.name})"
    seeds = [seed for seed in finals if seed in plain]
    members = comparison.arms[arm]
    if not seeds:
        answer = f"{arm} and {baseline().name} have no finished runs with a common seed."
        return Verdict("Not decided", subject, answer)
    count = _count(members)
    resolution = 1 / count if count else 0.0
    estimate = paired([finals[seed] for seed in seeds], [plain[seed] for seed in seeds], resolution=resolution)
    cautions = list(_few(members))
    if any(note.startswith("not matched") for note in comparison.notes):
        cautions.append("The arms differ in more than the regime: see the notes in the section below.")
    words: dict[str, Word] = {"above": "Helped", "below": "Hurt"}
    word = words.get(estimate.reading, "Not decided")
    interval = f"95 % interval {estimate.low:+.3f} to {estimate.high:+.3f}"
    if estimate.n < MIN_VALUES:
        interval, word = f"no interval: {MIN_VALUES} seeds are needed", "Not decided"
    commands: tuple[str, ...] = ()
    if word == "Not decided" and not _few(members):  # else more seeds are no help
        both = (*comparison.arms[baseline().name], *members)
        unused = 1 + max(run.seed for run in both if type(run.seed) is int)
        verb = "narrow the interval" if estimate.n >= MIN_VALUES else "give an interval"
        how = "" if in_sweep(members[0].root) else "; a sweep file runs many (mutualrl sweep)"
        cautions.append(f"More seeds would {verb}{how}.")
        for arm_runs, others in ((comparison.arms[baseline().name], finals), (members, plain)):
            missing = sorted(set(others) - {run.seed for run in arm_runs if type(run.seed) is int})
            seed = missing[0] if missing else unused  # first what the other arm has already
            commands += _again(arm_runs[0], seed=seed, directory=f"{arm_runs[0].root}-{seed}")
        if len(commands) == 1:  # a seed of one arm alone decides nothing
            commands = ()
    return Verdict(
        word,
        subject,
        number=f"{estimate.mean:+.3f}",
        interval=interval,
        basis=f"{_basis(members)}; seeds: {estimate.n}",
        cautions=tuple(cautions),
        commands=commands,
    )


def _basis(runs: Sequence[Run]) -> str:
    """Return what was measured, on how many problems."""
    return f"{_measure(runs)} (greedy{_averaged(runs)}){_problems(runs)}"


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
    return "accuracy" if measure_of(runs) == "accuracy" else "mean reward"


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
    if regime is not None and run.resample is not None:
        repeated += ["--set", "round.resample=false"]  # else the baseline would be sampled again, too
    if regime == baseline().name and run.setting("exchange.staleness"):
        repeated += ["--set", "exchange.staleness=0"]  # it does not wait for peers, and refuses the key
    if any("trust" in word for word in repeated) or _names_code(repeated):
        return ()
    return (shlex.join([*repeated, *(word for pair in changed.items() for word in pair)]),)


#: flags whose values are references, which may look like import paths: tiny:ada, book=recorded:task
_REFERENCES = ("--model", "--source", "--pool", "--data")
_CODE_KEYS = ("task.reward", "task.environment", "task.tools")


def _names_code(words: Sequence[str]) -> bool:
    """Return whether a command names the user's code by import path."""
    for before, word in itertools.pairwise(words):
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if not equals or flag in _REFERENCES:
            continue
        if flag == "--set" and value.strip().startswith(_CODE_KEYS):
            return True
        if is_import_path(value.rpartition("=")[2]):
            return True
    return False


def _replaced(assignment: str, changed: Mapping[str, str]) -> bool:
    """Return whether an assignment of `--set` is to something that changes: the regime, whose keys another one does
    not have, and with it dynamic sampling and waiting for peers, the seed, or the directory."""
    key = assignment.partition("=")[0]
    regime = (
        key.startswith(("regime.", "round.resample", "exchange.staleness"))
        or key == "regime"
        or (key.startswith("policies.") and ".regime" in key)
    )
    return ("--regime" in changed and regime) or (key == "run.seed" and "--seed" in changed) or key == "run.dir"


def _quoted(run: Run) -> str:
    return shlex.quote(str(run.root))
