"""Outcome of a run, as a comparison reads it: accuracy, signals, tokens and seconds, by policy."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mutualrl.errors import DataError, FileDamagedError
from mutualrl.reporting.distilled import RESULT as DISTILLED
from mutualrl.reporting.run_reader import Point, PolicyRun, Run, part
from mutualrl.reporting.series import first_reaching, mean_of
from mutualrl.storage.files import finite_number, read_any_json

LAST = 4  # signals are means over the last quarter of the steps
PARTS = 10  # a gate rate is stored as means over tenths of the run; a lesson's NLL is over the first tenth


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """One policy at the end of its run. `after`: greedy accuracy on the validation prompts, overall and by group;
    `problems`: number of prompts; `curve`: (step, accuracy). Tokens are counted over the whole run: `generated_tokens`
    by the policy, in its rollouts and in the samples that its regime requests; `extra_tokens` trained on besides its
    own rollouts; `asked_tokens` of the questions to its sources and their answers, divided among their learners.
    `entropy`, `kl`, `length` (tokens per rollout): means over the last quarter of the steps. `lesson_nll`: mean NLL per
    token, in nats, of the texts that it is taught, over the first tenth of the steps with any: their fit before it has
    learnt from them. `retained`: fraction of the validation prompts solved before training that are solved at the end.
    `pass_at`: pass@k of sampled completions by k, from `mutualrl eval --run`. None, or empty, if a run does not record
    it."""

    after: Mapping[str, float]
    before: Mapping[str, float] = field(default_factory=dict)
    problems: int | None = None
    curve: Sequence[tuple[int, float]] = ()
    entropy: float | None = None
    kl: float | None = None
    length: float | None = None
    gate: Sequence[float] = ()
    lesson_nll: float | None = None
    retained: float | None = None
    pass_at: Mapping[str, float] = field(default_factory=dict)
    generated_tokens: float | None = None
    extra_tokens: float | None = None
    asked_tokens: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run: pool, arm, seed and policies. `began`: when the run was created, empty if that was not
    recorded. `known`: the result was known before the claims were written, e.g. from an earlier study."""

    pool: str
    arm: str
    seed: int
    policies: Mapping[str, PolicyOutcome]
    began: str = ""
    known: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the outcome as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote."""
        policies = {name: PolicyOutcome(**each) for name, each in value["policies"].items()}
        began, known = str(value.get("began", "")), bool(value.get("known"))
        return cls(value["pool"], value["arm"], value["seed"], policies, began, known)

    def is_older_than(self, registered: str) -> bool:
        """Return whether the run is older than claims registered at a time, or its result was known then."""
        return self.known or bool(self.began and self.began < registered)


ALL = "all"


def of_run(run: Run, pool: str, arm: str) -> Outcome:
    """Return the outcome of a finished run. Raises DataError where one of its policies has no result."""
    policies = {}
    for name, policy in run.policies.items():
        if policy.result is None or policy.final is None:
            raise DataError(
                f"{run.root}: policy {name!r} has no final accuracy; finish it with: mutualrl train --resume"
            )
        policies[name] = _of_policy(run, name, policy)
    return Outcome(pool, arm, int(run.info.get("seed", 0)), policies, str(run.info.get("created", "")))


def _pass_at(run: Run, policy: str) -> dict[str, float]:
    """Return a policy's pass@k by k, from the last evaluation stored in a run that has any."""
    trained = [evaluation for evaluation in run.evaluations if not evaluation.initial]
    sampled = [evaluation.pass_at[policy] for evaluation in trained if evaluation.pass_at.get(policy)]
    return dict(sampled[-1]) if sampled else {}


def _retained(result: Mapping[str, Any]) -> float | None:
    """Return the fraction of the prompts solved before training that are solved at the end."""
    before, after = (part(result, key).get("solved") or "" for key in ("initial_validation", "validation"))
    if len(before) != len(after):
        return None
    still_solved = [end == "1" for begin, end in zip(before, after, strict=True) if begin == "1"]
    return statistics.fmean(still_solved) if still_solved else None


def _of_policy(run: Run, name: str, policy: PolicyRun) -> PolicyOutcome:
    by_step = policy.validations()
    first, last = by_step[0], by_step[-1]
    fingerprint = part(run.info, "fingerprint")
    completions = fingerprint.get("prompts_per_round", 0) * fingerprint.get("rollouts_per_prompt", 0)
    lengths = [point.value for point in policy.series("completions/mean_length")]
    requested = sum(point.value for point in policy.series("plan/sampled_tokens"))
    keys = {key for row in policy.metrics for key in row if key.endswith("/extra_tokens")}
    result = policy.result or {}
    return PolicyOutcome(
        after=_accuracies(last[1]),
        before=_accuracies(first[1]) if first[0] == 0 else {},
        problems=part(result, "validation").get("n"),
        curve=[(point.step, point.value) for point in policy.accuracy()],
        entropy=_late_mean(policy, "entropy"),
        kl=_late_mean(policy, "kl"),
        length=_late_mean(policy, "completions/mean_length"),
        gate=_tenths([point.value for point in policy.by_role("gate_rate")]),
        lesson_nll=_early_nll(policy),
        retained=_retained(result),
        pass_at=_pass_at(run, name),
        generated_tokens=sum(lengths) * completions + requested if lengths else None,
        extra_tokens=sum(point.value for key in sorted(keys) for point in policy.series(key)),
        asked_tokens=_asked_tokens(run, policy),
        seconds=finite_number(result.get("train_seconds")),
    )


def _asked_tokens(run: Run, policy: PolicyRun) -> float:
    """Return a policy's part of the tokens of the sources that were asked: each of their learners logs them all."""
    total = 0.0
    for source in part(run.info, "asked_sources"):
        keys = [f"source/{source}/{key}" for key in ("prompt_tokens", "completion_tokens")]
        readers = sum(bool(each.series(keys[0])) for each in run.policies.values())
        own = sum(point.value for key in keys for point in policy.series(key))
        total += own / readers if readers else 0.0
    return total


def _accuracies(validation: Mapping[str, Any]) -> dict[str, float]:
    return {**validation["by_group"], ALL: validation["accuracy"]}


def _late_mean(policy: PolicyRun, key: str) -> float | None:
    values = [point.value for point in policy.series(key)]
    return statistics.fmean(values[-max(1, len(values) // LAST) :]) if values else None


def _early_nll(policy: PolicyRun) -> float | None:
    keys = sorted({key for row in policy.metrics for key in row if key.endswith("/nll")})
    values = [point.value for key in keys for point in policy.series(key)]
    return statistics.fmean(values[: max(1, len(values) // PARTS)]) if values else None


def _tenths(values: Sequence[float]) -> list[float]:
    if len(values) < PARTS:
        return []
    cuts = [i * len(values) // PARTS for i in range(PARTS + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in pairwise(cuts)]


def of_distillation(directory: Path, pool: str, arm: str, seed: int) -> Outcome:
    """Return the outcome of `mutualrl paper distill`: its learners' accuracies."""
    result = read_any_json(directory / DISTILLED)
    if result is None:
        raise FileDamagedError(f"{directory / DISTILLED}: missing; the distillation has not finished")
    policies = {}
    for name, learner in part(result, "learners").items():
        accuracy = part(part(learner, "accuracy"), "sequential distillation")
        policies[name] = PolicyOutcome(after=_accuracies(accuracy), problems=accuracy.get("n"))
    return Outcome(pool, arm, seed, policies)


class Outcomes:
    """Outcomes by pool, arm and seed, and the measures that a comparison takes of them."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.by = {(o.pool, o.arm, o.seed): o for o in outcomes}

    @property
    def pools(self) -> list[str]:
        """Return the pools, in order of appearance."""
        return list(dict.fromkeys(pool for pool, _, _ in self.by))

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
        return [name for name in runs[0] if all(name in policies for policies in runs)] if runs else []

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

    def largest_k(self, pool: str) -> int | None:
        """Return the largest k of the pool's pass@k; None if no run has any."""
        outcomes = [outcome for key, outcome in self.by.items() if key[0] == pool]
        return max((int(k) for o in outcomes for policy in o.policies.values() for k in policy.pass_at), default=None)

    def resolution(self, pool: str, measure: str, problems: int | None = None) -> float:
        """Return the smallest step of a measure: one problem for an accuracy (of `problems`, if the runs do not record
        their number), one validation interval for `steps_to`, 0 for continuous measures.

        Runs do not record the size of a group: it is taken as the smallest that all its accuracies are fractions of.
        """
        name, _, group = measure.partition("/")
        outcomes = [outcome for key, outcome in self.by.items() if key[0] == pool]
        if name == "steps_to":
            curves = [[step for step, _ in policy.curve] for o in outcomes for policy in o.policies.values()]
            return float(max((b - a for steps in curves for a, b in pairwise(steps)), default=0))
        count = self.problems(pool) or problems
        if name != "accuracy" or not count:
            return 0.0
        if not group:
            return 1 / count
        values = {policy.after[group] for o in outcomes for policy in o.policies.values() if group in policy.after}
        return 1 / _denominator(values, count)

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
        `generated_tokens`, `extra_tokens`, `asked_tokens`, `seconds`, `gate_change` (last tenth of the run minus the
        first), `steps_to/ARM` (first step at which the pool's mean validation accuracy reaches ARM's final one of the
        same seed; the last step if it never does).
        """
        outcome = self.by[pool, arm, seed]
        if measure.startswith("steps_to/"):
            return self._steps_to(outcome, measure.partition("/")[2])
        chosen = list(outcome.policies.values()) if policy is None else [outcome.policies[policy]]
        values = [_measure(each, measure) for each in chosen]
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
        curve = mean_of([[Point(*point) for point in policy.curve] for policy in outcome.policies.values()])
        if goal is None or not curve:
            return None
        step = first_reaching(curve, goal)
        return float(curve[-1].step if step is None else step)


def _denominator(values: Collection[float], most: int) -> int:
    """Return the smallest n such that all values are multiples of 1/n; `most` if there is none below it."""
    for n in range(1, most):
        if all(abs(value * n - round(value * n)) < 1e-6 for value in values):
            return n
    return most


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
    "pass_at",
    "retained",
    "entropy",
    "kl",
    "length",
    "gate_change",
    "lesson_nll",
    "generated_tokens",
    "extra_tokens",
    "asked_tokens",
    "seconds",
    "steps_to",
)
