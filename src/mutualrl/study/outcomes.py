"""Outcome of a run, as a comparison reads it: accuracy, signals, tokens and seconds, by policy."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from mutualrl.errors import DataError, FileDamagedError
from mutualrl.reporting.distilled import RESULT as DISTILLED
from mutualrl.reporting.report_tables import sampled_tokens
from mutualrl.runs.curves import first_reaching, last, mean, series
from mutualrl.runs.logs import LoggedRun, Series, points
from mutualrl.runs.read import part
from mutualrl.storage.files import JsonObject, read_checksummed
from mutualrl.storage.metrics import EXTRA_TOKENS, OVER_CALLS, RESAMPLE_ATTEMPTS, RESAMPLE_MISSING, TURNS, of_source
from mutualrl.storage.run_info import PolicyResult, Validation

LAST = 4  # signals are means over the last quarter of the steps
PARTS = 10  # a gate rate is stored as means over tenths of the run; a lesson's NLL is over the first tenth


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """One policy at the end of its run. `after`: greedy accuracy on the validation prompts, overall and by group;
    `problems`: number of prompts, and `sizes`: by group; `curve`: (step, accuracy); `sampled`: tokens that it had
    sampled by each of these steps; `learnt`: that it had trained on besides its own rollouts. Tokens are counted
    over the whole run: `generated_tokens` by the policy, in its rollouts and in the samples that its regime
    requests; `extra_tokens` trained on besides its own rollouts; `asked_tokens` of the questions to its sources and
    their answers, divided among their learners. `entropy`, `kl`, `length` (tokens per rollout): means over the last
    quarter of the steps. `lesson_nll`: mean NLL per token, in nats, of the texts that it is taught, over the first
    tenth of the steps with any: their fit before it has learnt from them. `turns` and `over_calls` of rollouts with
    tools: means over the last quarter of the steps; `uncalled`: answers after a hint that were left out since they
    made no call. `attempts` of dynamic sampling and `equal_groups` that it left in the batch: means per round over
    the run. `retained`: fraction of the validation prompts solved before training that are solved at the end.
    `pass_at`: pass@k of sampled completions by k, from `mutualrl eval --run`. `mean_reward`: accuracies are means
    of rewards of the user's own. None, or empty, if a run does not record it."""

    after: Mapping[str, float]
    before: Mapping[str, float] = field(default_factory=dict)
    problems: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    curve: Sequence[tuple[int, float]] = ()
    sampled: Sequence[float] = ()
    learnt: Sequence[float] = ()
    entropy: float | None = None
    kl: float | None = None
    length: float | None = None
    gate: Sequence[float] = ()
    lesson_nll: float | None = None
    turns: float | None = None
    over_calls: float | None = None
    uncalled: float | None = None
    attempts: float | None = None
    equal_groups: float | None = None
    retained: float | None = None
    pass_at: Mapping[str, float] = field(default_factory=dict)
    generated_tokens: float | None = None
    extra_tokens: float | None = None
    asked_tokens: float | None = None
    seconds: float | None = None
    mean_reward: bool = False


_RECORDED = ("data", "version", "checkout")
#: of a run, beside the claims about it
Age = Literal["older", "newer", "not recorded"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run: pool, arm, seed and policies. `began`: when the run was created, empty if that was not
    recorded. `known`: the result was known before the claims were written, e.g. from an earlier study. `data`: digest
    of its training and validation prompts, `version`: of mutualrl, and `checkout`: commit of its code when the run
    began (`storage.rundir.checkout`); all empty if they were not recorded."""

    pool: str
    arm: str
    seed: int
    policies: Mapping[str, PolicyOutcome]
    began: str = ""
    known: bool = False
    data: str = ""
    version: str = ""
    checkout: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the outcome as JSON; without data, version and checkout where they were not recorded."""
        value = asdict(self)
        return {key: each for key, each in value.items() if each or key not in _RECORDED}

    @classmethod
    def from_json(cls, value: JsonObject) -> Outcome:
        """Return the outcome that `to_json` wrote."""
        policies = {name: PolicyOutcome(**each) for name, each in value["policies"].items()}
        began, *recorded = (str(value.get(key, "")) for key in ("began", *_RECORDED))
        known = bool(value.get("known"))
        return cls(value["pool"], value["arm"], value["seed"], policies, began, known, *recorded)

    @property
    def code(self) -> str:
        """Return the code that began the run: its commit, else its version, as far as they were recorded."""
        if self.checkout:
            commit, _, changed = self.checkout.partition("+")
            return f"{commit[:8]}{' with changes' if changed else ''}"
        return f"mutualrl {self.version}" if self.version else "not recorded"

    def age(self, registered: str) -> Age:
        """Return whether the run is older or newer than claims registered at a time; one whose result was known then is
        older, and of one that does not record when it began that is not recorded."""
        if self.known:
            return "older"
        if not self.began:
            return "not recorded"
        return "older" if self.began < registered else "newer"


ALL = "all"


def of_run(run: LoggedRun, pool: str, arm: str) -> Outcome:
    """Return the outcome of a finished run. Raises DataError where one of its policies has no result."""
    policies = {}
    for name, policy in run.policies.items():
        if policy.result is None or policy.final is None:
            raise DataError(
                f"{run.root}: policy {name!r} has no final accuracy; finish it with: "
                f"mutualrl train --resume --run-dir {run.root}"
            )
        policies[name] = _of_policy(run, name, policy.result)
    plan = run.info.fingerprint
    data = " ".join(str(plan[key])[:16] for key in ("data_sha256", "validation_sha256") if key in plan)
    version, code = (run.info.versions.get(key, "") for key in ("mutualrl", "checkout"))
    return Outcome(pool, arm, run.info.seed, policies, run.info.created, data=data, version=version, checkout=code)


def _pass_at(run: LoggedRun, policy: str) -> dict[str, float]:
    """Return a policy's pass@k by k, from the last evaluation stored in a run that has any."""
    trained = [evaluation for evaluation in run.evaluations if not evaluation.initial]
    sampled = [evaluation.pass_at[policy] for evaluation in trained if evaluation.pass_at.get(policy)]
    return dict(sampled[-1]) if sampled else {}


def _retained(before: Validation | None, after: Validation | None) -> float | None:
    """Return the fraction of the prompts solved before training that are solved at the end."""
    if before is None or after is None or len(before.solved) != len(after.solved):
        return None
    pairs = zip(before.solved, after.solved, strict=True)
    still_solved = [end == "1" for begin, end in pairs if begin == "1"]
    return statistics.fmean(still_solved) if still_solved else None


def _of_policy(run: LoggedRun, name: str, result: PolicyResult) -> PolicyOutcome:
    curve = run.accuracy_of(name)
    logged = run.logged(name)
    lessons = [metric for metric in logged if metric.endswith("/nll")]
    uncalled = [metric for metric in logged if metric.endswith("/uncalled")]
    sampled, learnt = sampled_tokens(run, name), run.series(name, EXTRA_TOKENS.key)
    return PolicyOutcome(
        after=_accuracies(run, name, curve.index[-1]),
        before=_accuracies(run, name, 0),
        problems=None if result.validation is None else result.validation.n,
        sizes={} if result.validation is None else result.validation.sizes,
        curve=points(curve),
        sampled=[last(sampled.loc[:step]) for step in curve.index] if len(sampled) else (),
        learnt=[float(learnt.loc[:step].sum()) for step in curve.index],
        entropy=_late_mean(run.series(name, "entropy")),
        kl=_late_mean(run.series(name, "kl")),
        length=_late_mean(run.series(name, "completions/mean_length")),
        gate=_tenths(run.by_role(name, "gate_rate").tolist()),
        lesson_nll=_early_mean([value for metric in lessons for value in run.series(name, metric)]),
        turns=_late_mean(run.series(name, TURNS.key)),
        over_calls=_late_mean(run.series(name, OVER_CALLS.key)),
        attempts=_mean_of(run.series(name, RESAMPLE_ATTEMPTS.key)),
        equal_groups=_mean_of(run.series(name, RESAMPLE_MISSING.key)),
        uncalled=_total([value for metric in uncalled for value in run.series(name, metric)]),
        retained=_retained(result.initial_validation, result.validation),
        pass_at=_pass_at(run, name),
        generated_tokens=last(sampled) if len(sampled) else None,
        extra_tokens=float(run.facts(name).extra_tokens),
        asked_tokens=_asked_tokens(run, name),
        seconds=result.train_seconds,
        mean_reward=not run.measures_accuracy,
    )


def _asked_tokens(run: LoggedRun, policy: str) -> float | None:
    """Return a policy's part of the tokens of the sources that were asked: they are divided among their learners. None
    if what a source did is not at hand."""
    total = 0.0
    for source in run.info.asked_sources:
        facts = run.source_facts(source)
        readers = [name for name in run.policies if len(run.series(name, of_source(source, "prompts")))]
        if not facts.asked:
            return None
        total += facts.tokens / len(readers) if policy in readers else 0.0
    return total


def _accuracies(run: LoggedRun, policy: str, step: int) -> dict[str, float]:
    """Return the accuracies of a validation by group, with `all` last; empty if there was none at that step."""
    by_group = {group: run.accuracy_of(policy, group).get(step) for group in run.groups(policy)}
    by_group[ALL] = run.accuracy_of(policy).get(step)
    return {group: float(accuracy) for group, accuracy in by_group.items() if accuracy is not None}


def _late_mean(values: Series) -> float | None:
    return None if values.empty else float(values.tail(max(1, len(values) // LAST)).mean())


def _mean_of(values: Series) -> float | None:
    return None if values.empty else float(values.mean())


def _total(values: Sequence[float]) -> float | None:
    return float(sum(values)) if values else None


def _early_mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values[: max(1, len(values) // PARTS)]) if values else None


def _tenths(values: Sequence[float]) -> list[float]:
    if len(values) < PARTS:
        return []
    cuts = [i * len(values) // PARTS for i in range(PARTS + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in pairwise(cuts)]


def of_distillation(directory: Path, pool: str, arm: str, seed: int) -> Outcome:
    """Return the outcome of `mutualrl paper distill`: its learners' accuracies."""
    result = read_checksummed(directory / DISTILLED)
    if result is None:
        raise FileDamagedError(f"{directory / DISTILLED}: missing; the distillation has not finished")
    policies = {}
    for name, learner in part(result, "learners").items():
        accuracy = part(part(learner, "accuracy"), "sequential distillation")
        after = {**part(accuracy, "by_group"), ALL: accuracy["accuracy"]}
        policies[name] = PolicyOutcome(after=after, problems=accuracy.get("n"))
    return Outcome(pool, arm, seed, policies, checkout=str(part(result, "versions").get("checkout", "")))


class Outcomes:
    """Outcomes by pool, arm and seed, and the measures that a comparison takes of them."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.by = {(o.pool, o.arm, o.seed): o for o in outcomes}

    @property
    def pools(self) -> list[str]:
        """Return the pools, in order of appearance."""
        return list(dict.fromkeys(pool for pool, _, _ in self.by))

    @property
    def code(self) -> str:
        """Return the code that began the runs, in the order of the runs' beginnings; how many runs each began if there
        are several."""
        counts = Counter(outcome.code for outcome in sorted(self.by.values(), key=lambda outcome: outcome.began))
        if len(counts) < 2:
            return "".join(counts)
        return ", ".join(f"{code} ({count} of {counts.total()})" for code, count in counts.items())

    def arms(self, pool: str) -> list[str]:
        """Return the arms of a pool, in order of appearance."""
        return list(dict.fromkeys(arm for name, arm, _ in self.by if name == pool))

    def seeds(self, pool: str, *arms: str) -> list[int]:
        """Return the seeds common to all of these arms."""
        sets = [{seed for name, each, seed in self.by if (name, each) == (pool, arm)} for arm in arms]
        return sorted(set.intersection(*sets)) if sets else []

    def policies(self, pool: str) -> list[str]:
        """Return the policies common to all runs of a pool."""
        runs = [outcome.policies for key, outcome in self.by.items() if key[0] == pool]
        shared: set[str] = set.intersection(*map(set, runs)) if runs else set()
        return [name for name in runs[0] if name in shared] if runs else []

    def groups(self, pool: str, policy: str) -> list[str]:
        """Return the groups of a policy's accuracy, including `all`."""
        of_pool = (outcome for key, outcome in self.by.items() if key[0] == pool)
        return list(dict.fromkeys(group for outcome in of_pool for group in outcome.policies[policy].after))

    def problems(self, pool: str) -> int | None:
        """Return the number of problems that accuracy was measured on; the smallest if runs differ."""
        counts = [
            policy.problems
            for key, outcome in self.by.items()
            for policy in outcome.policies.values()
            if key[0] == pool and policy.problems
        ]
        return min(counts, default=None)

    def measure_rewards(self, pool: str) -> bool:
        """Return whether accuracies of a pool are means of rewards of the user's own, which have no bounds. Rewards of
        which every mean is a whole number of problems are taken to be 0 or 1."""
        policies = [p for key, outcome in self.by.items() if key[0] == pool for p in outcome.policies.values()]
        means = [(mean, p.problems or 1) for p in policies for mean in (p.after.get(ALL), p.before.get(ALL))]
        whole = all(mean is None or (0 <= mean <= 1 and _is_whole(mean * count)) for mean, count in means)
        return any(policy.mean_reward for policy in policies) and not whole

    def shown_k(self, pool: str) -> list[int]:
        """Return the k of the pool's pass@k that a table shows: of those that a run has, 1, 8 and the largest."""
        outcomes = [outcome for key, outcome in self.by.items() if key[0] == pool]
        measured = {int(k) for o in outcomes for policy in o.policies.values() for k in policy.pass_at}
        return sorted(k for k in measured if k in (1, 8, max(measured)))

    def resolution(self, pool: str, measure: str, problems: int | None = None) -> float:
        """Return the smallest step of a measure: one problem for an accuracy (of `problems`, if the runs do not record
        their number), one validation interval for `steps_to`, 0 for continuous measures.

        The size of a group that runs do not record is taken as the smallest that all its accuracies are fractions of.
        """
        name, _, group = measure.partition("/")
        outcomes = [outcome for key, outcome in self.by.items() if key[0] == pool]
        if name == "steps_to":
            curves = [policy.curve for outcome in outcomes for policy in outcome.policies.values()]
            return float(max((b - a for curve in curves for (a, _), (b, _) in pairwise(curve)), default=0))
        count = self.problems(pool) or problems
        if name not in ("accuracy", "accuracy_at_tokens") or not count:
            return 0.0
        if not group or name == "accuracy_at_tokens":
            return 1 / count
        if (size := self.size(pool, group)) is not None:
            return 1 / size
        values = {policy.after[group] for o in outcomes for policy in o.policies.values() if group in policy.after}
        return 1 / _denominator(values, count)

    def size(self, pool: str, group: str) -> int | None:
        """Return the smallest number of problems of a group in any run; None if one does not record it."""
        policies = [p for key, outcome in self.by.items() if key[0] == pool for p in outcome.policies.values()]
        sizes = [policy.sizes.get(group) for policy in policies if group in policy.after]
        known = [size for size in sizes if size]
        return min(known) if known and len(known) == len(sizes) else None

    def ranked(self, pool: str, arm: str) -> list[str]:
        """Return the policies of a pool by accuracy before training, worst first, in an arm's first seed; empty if it
        is not recorded."""
        policies = self.by[pool, arm, self.seeds(pool, arm)[0]].policies
        if not all(ALL in policy.before for policy in policies.values()):
            return []
        return sorted(policies, key=lambda name: policies[name].before[ALL])

    def value(self, pool: str, arm: str, seed: int, measure: str, policy: str | None = None) -> float | None:
        """Return a measure of a policy, or its mean over the pool; None if a run lacks it.

        Measures: `accuracy`, `accuracy/GROUP`, `pass_at/K`, `retained`, `entropy`, `kl`, `length`, `lesson_nll`,
        `turns`, `over_calls`, `uncalled`, `attempts`, `equal_groups`, `generated_tokens`, `extra_tokens`,
        `asked_tokens`, `seconds`, `gate_change` (last tenth of the run minus the first), `steps_to/ARM` (first step at
        which the pool's mean validation accuracy reaches ARM's final one of the same seed; the last step if it never
        does), `accuracy_at_tokens/ARM` (accuracy at the last validation before the policy had sampled and trained on
        more tokens than the same policy did in all of ARM's run of the same seed).
        """
        outcome = self.by[pool, arm, seed]
        if measure.startswith("steps_to/"):
            return self._steps_to(outcome, measure.partition("/")[2])
        chosen = list(outcome.policies) if policy is None else [policy]
        if measure.startswith("accuracy_at_tokens/"):
            base = self.by.get((pool, measure.partition("/")[2], seed))
            others = {} if base is None else base.policies
            values = [_at_tokens(outcome.policies[name], others.get(name)) for name in chosen]
        else:
            values = [_measure(outcome.policies[name], measure) for name in chosen]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(values) else None

    def by_seed(
        self, pool: str, arm: str, seeds: Sequence[int], measure: str, policy: str | None = None
    ) -> list[float] | None:
        """Return a measure for each seed, as `value` does; None if there is no seed, or a run lacks it."""
        values = [self.value(pool, arm, seed, measure, policy) for seed in seeds]
        known = [value for value in values if value is not None]
        return known if known and len(known) == len(values) else None

    def _steps_to(self, outcome: Outcome, arm: str) -> float | None:
        if (outcome.pool, arm, outcome.seed) not in self.by:
            return None
        goal = self.value(outcome.pool, arm, outcome.seed, "accuracy")
        curve = mean([series(dict(policy.curve)) for policy in outcome.policies.values()])
        if goal is None or curve.empty:
            return None
        step = first_reaching(curve, goal)
        return float(curve.index[-1] if step is None else step)


def _denominator(values: Collection[float], most: int) -> int:
    """Return the smallest n such that all values are multiples of 1/n; `most` if there is none below it."""
    for n in range(1, most):
        if all(_is_whole(value * n) for value in values):
            return n
    return most


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-6


def _at_tokens(policy: PolicyOutcome, base: PolicyOutcome | None) -> float | None:
    """Return the accuracy at the last validation before a policy had sampled and, besides its own rollouts, trained on
    more tokens than another one did in all; None if that is not recorded."""
    if base is None or base.generated_tokens is None or len(policy.sampled) != len(policy.curve):
        return None
    if policy.extra_tokens and len(policy.learnt) != len(policy.curve):
        return None
    learnt = policy.learnt or [0.0] * len(policy.curve)
    total = base.generated_tokens + (base.extra_tokens or 0.0)
    rows = zip(policy.curve, policy.sampled, learnt, strict=True)
    reached = [accuracy for (_, accuracy), tokens, extra in rows if tokens + extra <= total]
    return reached[-1] if reached else None


def _measure(policy: PolicyOutcome, measure: str) -> float | None:
    name, _, group = measure.partition("/")
    if name == "accuracy":
        return policy.after.get(group or ALL)
    if name == "pass_at":
        return policy.pass_at.get(group)
    if name == "gate_change":
        return policy.gate[-1] - policy.gate[0] if policy.gate else None
    value: float | None = getattr(policy, name)
    return value


MEASURES = (
    "accuracy",
    "accuracy_at_tokens",
    "pass_at",
    "retained",
    "entropy",
    "kl",
    "length",
    "gate_change",
    "lesson_nll",
    "turns",
    "over_calls",
    "uncalled",
    "attempts",
    "equal_groups",
    "generated_tokens",
    "extra_tokens",
    "asked_tokens",
    "seconds",
    "steps_to",
)
