"""Runs with their logs: one frame of metrics, and the rescues.

A metric that is null, NaN, infinite, larger than 1e100, or not a number was not measured: it has no row in the frame.
A missing row is never read as 0 and never interpolated; a sum over steps takes those that were measured, and a curve
over several runs the steps that all of them have. A step that is logged twice counts once, as logged last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pandas as pd

from mutualrl.console.user_path import user_path
from mutualrl.errors import FileDamagedError, UsageError
from mutualrl.runs.facts import accounts_of, policy_facts, source_facts
from mutualrl.runs.lines import step_of
from mutualrl.runs.notes import LearningNotes, data_notes, unscorable_note
from mutualrl.runs.read import read_run, short, validation_of
from mutualrl.runs.record import PolicyRecord, Run, policies_in
from mutualrl.see import open_store
from mutualrl.storage.accounts import Account, SourceFacts
from mutualrl.storage.artifacts import FileDigest
from mutualrl.storage.files import JsonObject, finite_number, read_regular
from mutualrl.storage.run_info import PolicyFacts, Validation, measured
from mutualrl.storage.run_logs import recorded_sums
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    Series: TypeAlias = pd.Series[float]
else:
    Series = pd.Series  # values by step

LARGEST_LOG = 4 * 2**30  # bytes per metrics.jsonl or rescues.jsonl
ACCURACY = "validation/accuracy"  # of all prompts; of a group: validation/accuracy/GROUP
LEVELS = ["policy", "metric", "step"]


class LoggedRun(Run):
    """Run with its logs. `metrics`: one value per `LEVELS`, sorted; validations are the metric `ACCURACY` and, per
    group, one below it: before training (step 0), during and after it. `steps`: the last logged step by policy;
    `rescues`: lines of rescues.jsonl by policy; `accounts`: by source that was asked, what the exchange has of it."""

    metrics: Series
    steps: Mapping[str, int]
    rescues: Mapping[str, tuple[JsonObject, ...]]
    accounts: Mapping[str, Account] = {}

    def series(self, policy: str, metric: str) -> Series:
        """Return the values of a metric by step; empty if it was never measured."""
        try:
            values: Series = self.metrics.loc[(policy, metric)]  # type: ignore[assignment]  # a partial key: a series
        except KeyError:
            return pd.Series(index=pd.Index([], dtype="int64", name="step"), dtype="float64", name="value")
        return values

    def total(self, policy: str, metric: str) -> float:
        """Return the sum of a metric over the steps; 0 if it was never measured."""
        return float(self.series(policy, metric).sum())

    def by_role(self, policy: str, role: str) -> Series:
        """Return the values of the metric with this role in the run's regime; empty if it has none."""
        return self.series(policy, self.rule.metric(role) or "")

    def facts(self, policy: str) -> PolicyFacts:
        """Return what a policy's prompts and rounds came to."""
        return policy_facts(partial(self._values, policy), teaches=self.rule.teaches)

    def source_facts(self, source: str) -> SourceFacts:
        """Return what a source gave and cost: as a finished run's summary has it, else by the exchange and the logs."""
        if self.summary is not None and source in self.summary.source_facts:
            return self.summary.source_facts[source]
        values = {name: partial(self._values, name) for name in self.policies}
        sections = [each for each in self.setting("sources") or () if isinstance(each, dict)]
        section = next((each for each in sections if each.get("name") == source), {})
        readers = section.get("learners") or [policy["name"] for policy in policies_in(self.recipe)]
        prices = section.get("price_per_million")
        return source_facts(source, values, self.accounts.get(source), [str(name) for name in readers], prices)

    def _values(self, policy: str, metric: str) -> list[float]:
        return self.series(policy, metric).tolist()

    @property
    def sources(self) -> list[str]:
        """Return the sources that it read, recorded ones first."""
        return [*self.info.sources, *self.info.asked_sources]

    def accuracy_of(self, policy: str, group: str | None = None) -> Series:
        """Return greedy accuracy by step, of a group or of all."""
        return self.series(policy, ACCURACY if group is None else f"{ACCURACY}/{group}")

    def logged(self, policy: str) -> list[str]:
        """Return the metrics of a policy, sorted."""
        codes = self.metrics.index.get_level_values("policy") == policy
        return sorted(self.metrics.index[codes].unique("metric"))

    def groups(self, policy: str) -> list[str]:
        """Return the groups of the validation accuracy, sorted."""
        prefix = f"{ACCURACY}/"
        return [metric.removeprefix(prefix) for metric in self.logged(policy) if metric.startswith(prefix)]


def read_logged(path: Path) -> LoggedRun:
    """Read a run directory in any state, with its logs; raises as `read_run`."""
    run = read_run(path)
    directory, notes = RunDirectory(run.root), list(run.notes)
    rows: dict[str, list[tuple[str, int, float]]] = {}
    steps, rescues = {}, {}
    for name, policy in run.policies.items():
        files = directory.policy(name)
        sums = recorded_sums(files)
        lines = _lines(files.metrics, sums.get(files.metrics), notes, run.root)
        rescues[name] = _lines(files.rescues, sums.get(files.rescues), notes, run.root)
        validations, wrong = _validations(policy, lines)
        rows[name] = [*_measured(lines), *validations]
        if wrong:
            where = files.metrics.relative_to(run.root)
            notes.append(f"{where}: {len(wrong)} validations are not valid (step {_first(wrong)}) and are left out")
        steps[name] = max((row["step"] for row in lines), default=0)
        notes += [
            f"{name}: {note}" for note in LearningNotes.of(run.rule.metrics, lines, recipe=not run.info.scripts).notes()
        ]
        notes += unscorable_note(name, policy.validation)
        limit = run.setting("task.max_prompt_tokens")
        notes += [note for note in data_notes(directory, name, limit) if note not in notes]
        if lines and not (run.info.scripts or policy.result or files.before.exists()):
            notes.append(f"{files.before.relative_to(run.root)} is missing: its accuracy before training is not shown")
        if not lines:
            notes.append(f"policy {name!r} has no step in its metrics.jsonl yet")
    accounts: Mapping[str, Account] = {}
    if run.info.asked_sources and not run.info.exchange:  # one that is in a bucket is not asked for a page
        accounts = accounts_of(open_store(directory.exchange), run.info.asked_sources, notes)
    fields = {name: getattr(run, name) for name in Run.model_fields} | {"notes": tuple(notes)}
    return LoggedRun(**fields, metrics=frame(rows), steps=steps, rescues=rescues, accounts=accounts)


def read_samples(run: LoggedRun, policy: str, notes: list[str]) -> tuple[JsonObject, ...]:
    """Return the lines of a policy's samples.jsonl; what is wrong with it is noted."""
    files = RunDirectory(run.root).policy(policy)
    return _lines(files.samples, recorded_sums(files).get(files.samples), notes, run.root)


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Return the runs in order, with unique names. Raises UsageError if a path is given twice."""
    roots = [user_path(path).resolve() for path in paths]
    if duplicate := next((path for i, path in enumerate(roots) if path in roots[:i]), None):
        raise UsageError(f"{duplicate} is given twice; it would count as two runs")
    runs: dict[str, LoggedRun] = {}
    for path in roots:
        run = read_logged(path)
        name, number = run.name, 2
        if name in runs:
            name = f"{path.parent.name}/{path.name}"
        while name in runs:
            name, number = f"{path.name} ({number})", number + 1
        runs[name] = run.model_copy(update={"name": name})
    return list(runs.values())


def frame(rows: Mapping[str, Iterable[tuple[str, int, float]]]) -> Series:
    """Return the frame of (metric, step, value) by policy: a series with the levels `LEVELS`, sorted by them."""
    keys: list[tuple[str, str, int]] = []
    values: list[float] = []
    for policy in sorted(rows):
        by_metric: dict[str, dict[int, float]] = {}
        for metric, step, value in rows[policy]:
            # JSON may have lone surrogates, which Arrow refuses
            name = metric.encode("utf-8", "replace").decode()
            by_metric.setdefault(name, {})[step] = value
        for metric in sorted(by_metric):
            steps = sorted(by_metric[metric])
            keys += [(policy, metric, step) for step in steps]
            values += [by_metric[metric][step] for step in steps]
    columns = zip(*keys, strict=True) if keys else ([], [], [])
    index = pd.MultiIndex.from_arrays([pd.Index(column) for column in columns], names=LEVELS)
    return pd.Series(values, index=index, dtype="float64", name="value")


def points(values: Series) -> list[tuple[int, float]]:
    """Return (step, value) in order of the steps."""
    return list(zip(values.index.tolist(), values.tolist(), strict=True))


def _measured(lines: Iterable[JsonObject]) -> Iterable[tuple[str, int, float]]:
    """Yield what the rows of a metrics.jsonl measured."""
    for row in lines:
        for metric, value in row.items():
            if metric != "step" and (number := finite_number(value)) is not None:
                yield metric, row["step"], number


def _validations(policy: PolicyRecord, lines: Iterable[JsonObject]) -> tuple[list[tuple[str, int, float]], list[int]]:
    """Return the validations of a policy in which a completion had a reward, and the steps of those in its log that are
    not valid; the last one of a finished policy is in its result."""
    result = policy.result
    by_step: dict[int, Validation | None] = {}
    wrong = []
    for row in lines:
        given, step = row.get("validation"), row["step"]
        by_step[step] = validation_of(given)
        if given is not None and by_step[step] is None and (result is None or step != result.steps):
            wrong.append(step)
    by_step[0] = policy.before if result is None else result.initial_validation or policy.before
    if result is not None:
        by_step[result.steps] = result.validation
    rows = []
    for step, validation in by_step.items():
        if validation is not None and (accuracy := measured(validation)) is not None:
            rows.append((ACCURACY, step, accuracy))
            rows += [(f"{ACCURACY}/{group}", step, value) for group, value in validation.by_group.items()]
    return rows, wrong


def _lines(path: Path, recorded: FileDigest | None, notes: list[str], root: Path) -> tuple[JsonObject, ...]:
    """Return the rows of a JSON Lines file that have a step; none if the recorded prefix fails its checksum. An
    unterminated last line is still being written, or was torn."""
    where = path.relative_to(root)
    try:
        data = read_regular(path, LARGEST_LOG)
    except FileNotFoundError:
        return ()
    except (OSError, FileDamagedError) as error:
        notes.append(f"{where} is left out: {short(error, path)}")
        return ()
    if recorded is not None and hashlib.sha256(data[: recorded.bytes]).hexdigest() != recorded.sha256:
        notes.append(f"{where} is left out: its bytes do not match its checksum")
        return ()
    rows: list[JsonObject] = []
    bad: list[int] = []
    for line, text in enumerate(data.split(b"\n")[:-1], 1):
        row = step_of(text)
        if row is None:
            bad.append(line)
        else:
            rows.append(row)
    if data and not data.endswith(b"\n"):
        notes.append(f"{where}: its last line is incomplete (being written, or torn by a kill) and is left out")
    if bad:
        notes.append(f"{where}: {len(bad)} lines are not valid records ({_first(bad)}) and are left out")
    return tuple(rows)


def _first(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
