"""Notes on a run in which there is little to learn: all rewards equal, or a regime that never acts.

Computed from the lines of metrics.jsonl, while a run trains (`after` steps) and at its end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mutualrl.console.display import counted
from mutualrl.errors import FileDamagedError
from mutualrl.recipes.agreement import too_long_notes
from mutualrl.storage.files import JsonObject, finite_number, read_checksummed
from mutualrl.storage.metrics import (
    CALL_FREQUENCY,
    CHANGED,
    FAILURE_FREQUENCY,
    LEFT_OUT,
    PEERS,
    REASONING,
    SAMPLES,
    TOO_LONG,
    Metric,
)
from mutualrl.storage.run_info import Validation, policy_result
from mutualrl.storage.rundir import RunDirectory

LIVE_STEPS = 10  # after which a run that still trains gets a note
#: metrics of a source that say whether it gave anything
OF_SOURCE = re.compile(r"source/([^/]+)/(questions|left_out|failed|cut_off|texts|confirmed)")


def live_after(steps: int) -> int:
    """Return the step after which a run that still trains gets its notes: `LIVE_STEPS`, in short runs the middle."""
    return max(1, min(LIVE_STEPS, steps // 2))


class LearningNotes:
    """Counts over one policy's steps, and the notes that follow from them. `metrics`: of the regime; `recipe`: whether
    the run has one, as those of users' own scripts do not."""

    def __init__(self, metrics: Iterable[Metric], *, recipe: bool = True) -> None:
        declared = list(metrics)
        self._gates = [metric.key for metric in declared if metric.role == "gate_rate"]
        self._actions = [metric.key for metric in declared if metric.role in ("rescues", "action")]
        self._unrenderable = [metric.key for metric in declared if metric.key.endswith("/unrenderable")]
        self.steps = 0
        self._rewards: set[float] = set()
        self._unrewarded = 0  # steps in which no rollout had a reward
        self._varied = False
        self._sums: dict[str, float] = {}
        self._recipe = recipe
        self._tool_failures: list[float] = []  # fraction of calls that failed, of steps with calls
        self._peers = False  # whether there was a policy to read beside sources
        self._sources: dict[str, Counter[str]] = {}

    @classmethod
    def of(cls, metrics: Iterable[Metric], rows: Iterable[JsonObject], *, recipe: bool = True) -> LearningNotes:
        """Count the steps of a finished log."""
        learning = cls(metrics, recipe=recipe)
        for row in rows:
            learning.add(row)
        return learning

    def add(self, row: JsonObject) -> None:
        """Add a step."""
        self.steps += 1
        reward, spread = finite_number(row.get("reward")), finite_number(row.get("reward_std"))
        self._unrewarded += reward is None and bool(finite_number(row.get("rewards/unscorable")))
        self._varied = self._varied or reward is None or spread != 0
        if reward is not None:
            self._rewards.add(reward)
        left_out = [metric.key for metric in LEFT_OUT.values()] + self._unrenderable
        for key in (*self._gates, *self._actions, SAMPLES.key, *left_out):
            if (value := finite_number(row.get(key))) is not None:
                self._sums[key] = self._sums.get(key, 0.0) + abs(value)
        if row.get(CALL_FREQUENCY) and (failed := finite_number(row.get(FAILURE_FREQUENCY))) is not None:
            self._tool_failures.append(failed)
        self._peers = self._peers or bool(finite_number(row.get(PEERS.key)))
        for key in row:
            if (match := OF_SOURCE.fullmatch(key)) and (value := finite_number(row[key])) is not None:
                self._sources.setdefault(match[1], Counter())[match[2]] += round(value)

    def notes(self) -> list[str]:
        """Return the notes on the steps so far."""
        if not self.steps:
            return []
        span = f"in all {self.steps} steps" if self.steps > 1 else "in its one step"
        if self._unrewarded == self.steps:
            return [
                f"no rollout has a reward {span}: the reward functions returned None, NaN or an infinite number, so "
                "there is nothing to learn from. Try them on known answers (mutualrl train ... --dry-run)"
            ]
        if not self._varied and len(self._rewards) == 1:
            (reward,) = self._rewards
            taught = any(self._sums.get(key) for key in self._actions)
            refused = any(
                self._sums.get(key) for key in (*(each.key for each in LEFT_OUT.values()), *self._unrenderable)
            )
            if refused and not taught:
                return [f"every reward is {reward:g} {span}, and no text was learnt: {self._reason()}"]
            what = (
                "the texts that it was taught are all it learned from" if taught else "there is nothing to learn from"
            )
            if self._tool_failures and min(self._tool_failures) == 1:
                why = "Every call of a tool failed: policies/NAME/logs says how"
                return [f"every reward is {reward:g} {span}: {what}. {why}"]
            return [f"every reward is {reward:g} {span}: {what}. {_advice(reward)}"]
        known = [key for key in self._actions if key in self._sums]
        if not known or any(self._sums[key] for key in known):
            return []
        gate = max((self._sums.get(key, 0.0) for key in self._gates), default=None)
        if gate == 0:
            return [f"the regime never acted {span}: {self._closed()}"]
        return [f"the regime never acted {span}{self._opened(gate)}: {self._reason()}"]

    def _closed(self) -> str:
        """Return why the gate never opened, for peers and each kind of source."""
        others = ["a peer's succeed"] if self._peers or not self._sources else []
        others += [f"a text of source {name} earn a reward above the threshold" for name in self._sources]
        why = f"on no prompt did every own rollout fail and {' or '.join(others)}"
        given = [reason for name, counts in self._sources.items() if (reason := _nothing_of(name, counts)) is not None]
        if self._recipe and (self._peers or not self._sources):
            given.append("mutualrl complementarity --run DIR shows what each policy solves")
        return f"{why} ({'; '.join(given)})" if given else why

    def _opened(self, gate: float | None) -> str:
        return "" if gate is None else f", although its gate opened for {gate / self.steps:.0%} of the prompts"

    def _of_others(self, count: float, noun: str) -> str:
        """Return a count of what others published."""
        others = ["peers"] * (self._peers or not self._sources) + ["sources"] * bool(self._sources)
        return f"{counted(round(count), noun)} of {' and '.join(others)}"

    def _reason(self) -> str:
        long, changed = self._sums.get(TOO_LONG.key, 0.0), self._sums.get(CHANGED.key, 0.0)
        if (lost := sum(self._sums.get(key, 0.0) for key in self._unrenderable)) > long:
            return (
                f"{self._of_others(lost, 'run')} that this policy's chat template cannot keep, that call a tool "
                "which it lacks, or without room or a turn that it can use; mutualrl thl-check --suite turns --source "
                "MODEL says what it loses, and hinted shows a run with any template"
            )
        if (unopened := self._sums.get(REASONING.key, 0.0)) > max(long, changed):
            return (
                f"{self._of_others(unopened, 'text')} without reasoning, where this policy's prompts open a block of "
                "it (<think>); expected texts that reason, or trainer.chat_template_kwargs: {enable_thinking: false}"
            )
        if long and long >= changed:
            return (
                f"{self._of_others(long, 'text')} longer than trainer.max_completion_length in this policy's tokens; "
                "raise it for this policy (policies: trainer.max_completion_length)"
            )
        if changed:
            return (
                f"this policy's tokenizer changes {self._of_others(changed, 'text')}, which cannot be learned; "
                "mutualrl thl-check --pool POOL names the pair"
            )
        if samples := self._sums.get(SAMPLES.key, 0.0):
            return (
                f"of {counted(round(samples), 'answer')} that it asked this policy for, none was confirmed by the "
                "rewards and kept by its filters"
            )
        others = ["peer"] * (self._peers or not self._sources) + ["source"] * bool(self._sources)
        return f"no {' or '.join(others)} published a row that it can use"


def _nothing_of(name: str, counts: Counter[str]) -> str | None:
    """Return what a source did not give: answers, texts on the rounds' prompts, or confirmed ones; None if it gave
    some. `counts`: sums of its metrics."""
    sent = counts["questions"] - counts["left_out"]
    if counts["confirmed"]:
        return None
    if counts["failed"] and counts["failed"] == sent:
        return f"source {name} answered none of its {sent:,} questions"
    if counts["left_out"] and not sent:
        return f"none of {counts['left_out']:,} questions was sent to source {name}: its budget was spent before"
    if counts["cut_off"] and counts["cut_off"] + counts["failed"] >= sent:
        return f"{counts['cut_off']:,} answers of source {name} were cut off: raise sources.{name}.max_tokens"
    if not counts["texts"]:
        return f"source {name} had no text on a prompt of these steps"
    return f"none of {counts['texts']:,} texts of source {name} was confirmed"


def _advice(reward: float) -> str:
    if reward <= 0:
        return (
            "Try the reward on known answers (mutualrl train ... --dry-run), raise trainer.max_completion_length if "
            "completions are cut off (completions/clipped_ratio), or start with easier prompts"
        )
    return "Use harder prompts, or a reward that tells rollouts apart"


def data_notes(run: RunDirectory, policy: str, limit: int | None) -> list[str]:
    """Return notes about prompts that a policy left out as too long; none before it has counted them. Their file being
    damaged is reported by `runs verify`."""
    try:
        counts = read_checksummed(run.policy(policy).prompts, root=run.root)
    except (FileDamagedError, OSError):
        return []
    if counts is None or limit is None:
        return []
    splits = {key: counts[key] for key in ("train", "validation") if isinstance(counts.get(key), dict)}
    return too_long_notes(splits, limit)


def unscorable_note(policy: str, validation: Validation | None) -> list[str]:
    """Return the note on held-out completions without a reward, if there are any."""
    if validation is None or not validation.unscorable:
        return []
    count = f"{validation.unscorable} of {validation.n} held-out completions"
    return [f"{policy}: {count} have no reward (None or NaN); they count as 0"]


def notes_of(
    run: RunDirectory, rows_by_policy: Mapping[str, Sequence[JsonObject]], metrics: Sequence[Metric], limit: int | None
) -> list[str]:
    """Return the notes on a run's data, each once, and on what each policy learned from, with its name.
    `rows_by_policy`: of their metrics.jsonl."""
    notes: dict[str, None] = {}
    for policy in rows_by_policy:
        notes |= dict.fromkeys(data_notes(run, policy, limit))
    for policy, rows in rows_by_policy.items():
        notes |= dict.fromkeys(f"{policy}: {note}" for note in LearningNotes.of(metrics, rows).notes())
        result = policy_result(run.policy(policy).result, run.root)
        notes |= dict.fromkeys(unscorable_note(policy, None if result is None else result.validation))
    return list(notes)
