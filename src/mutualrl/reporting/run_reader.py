"""Runs as read from their files: finished, running, stopped or damaged. Nothing is repaired or guessed: unreadable
parts are listed in `notes`, the rest is shown."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mutualrl.errors import FileDamagedError, RecipeError, RunInterruptedError, UsageError
from mutualrl.process.status import ELSEWHERE, RunState, status_file
from mutualrl.recipes import yaml_file
from mutualrl.recipes.agreement import data_note
from mutualrl.records import POLICY_NAME
from mutualrl.regimes.info import RegimeInfo
from mutualrl.regimes.regime import SUCCESS_ABOVE, flat
from mutualrl.reporting.run_notes import LearningNotes, data_notes, unscorable_note
from mutualrl.storage.artifacts import FileDigest
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import (
    JsonObject,
    finite_number,
    open_regular,
    parse_or_none,
    read_checksummed,
    read_json,
    read_regular,
    try_read_bytes,
    try_read_json,
    user_path,
)
from mutualrl.storage.run_logs import recorded_sums, verify_log
from mutualrl.storage.rundir import FORMAT, RunDirectory, holder_of, read_run_json

Row = JsonObject
POLICY = re.compile(POLICY_NAME)
LARGEST_LOG = 4 * 2**30  # bytes per metrics.jsonl or rescues.jsonl


class Point(NamedTuple):
    """Value at an optimizer step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy of a run. `metrics`: rows of metrics.jsonl; `before`: validation before training; `result`: content of
    result.json, None until the policy finishes."""

    name: str
    model: str
    metrics: tuple[Row, ...]
    rescues: tuple[Row, ...]
    before: Row | None
    result: Row | None
    rule: RegimeInfo

    def by_role(self, role: str) -> list[Point]:
        """Return the values of the metric with this role in the policy's regime; empty if it has none."""
        key = self.rule.metric(role)
        return [] if key is None else self.series(key)

    def series(self, key: str) -> list[Point]:
        """Return the finite values of a metric, by step."""
        return [Point(row["step"], value) for row in self.metrics if (value := finite_number(row.get(key))) is not None]

    def validations(self) -> list[tuple[int, Row]]:
        """Return greedy validations by step: before (step 0), during and after training, as `{"accuracy", "by_group"}`
        with only finite numbers."""
        result = self.result or {}
        by_step = {row["step"]: row.get("validation") for row in self.metrics}
        by_step |= {0: self.before} | ({0: result["initial_validation"]} if "initial_validation" in result else {})
        if type(result.get("steps")) is int:
            by_step[result["steps"]] = result.get("validation")
        return [
            (step, validation)
            for step, value in sorted(by_step.items())
            if (validation := validation_of(value)) is not None
        ]

    @property
    def final(self) -> float | None:
        """Return the final accuracy; None for a policy that has not finished or was lost."""
        validation = None if self.result is None else validation_of(self.result.get("validation"))
        return None if validation is None else validation["accuracy"]

    def accuracy(self, group: str | None = None) -> list[Point]:
        """Return validation accuracy by step, for a group or for all."""
        points = []
        for step, validation in self.validations():
            value = validation["accuracy"] if group is None else validation["by_group"].get(group)
            if value is not None:
                points.append(Point(step, value))
        return points

    @property
    def groups(self) -> list[str]:
        """Return the groups of the validation accuracy."""
        return sorted({group for _, validation in self.validations() for group in validation["by_group"]})

    @property
    def steps(self) -> int:
        """Return the last logged step."""
        return self.metrics[-1]["step"] if self.metrics else 0


class Evaluation(NamedTuple):
    """Results of `mutualrl eval --run`. `how`: suite, decoding, and tasks with number of prompts and token limit;
    evaluations are comparable if equal. `accuracy`: by policy, then task. `pass_at`: over all tasks, by policy, then k;
    empty for greedy decoding. `initial`: of the models before training (`--initial`)."""

    how: str
    tasks: tuple[str, ...]
    accuracy: Mapping[str, Mapping[str, float]]
    pass_at: Mapping[str, Mapping[str, float]]
    initial: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Run. `name`: name of its directory, with more of the path if ambiguous; `notes`: messages about damaged or
    missing data."""

    root: Path
    name: str
    info: Row
    recipe: Row
    policies: Mapping[str, PolicyRun]
    summary: Row | None
    state: RunState
    notes: tuple[str, ...]
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def seed(self) -> Any:
        """Return the run's seed."""
        return self.info.get("seed")

    @property
    def regime(self) -> str:
        """Return the regime's name."""
        return self.rule.name

    @property
    def rule(self) -> RegimeInfo:
        """Return the description of the regime that the run recorded."""
        return RegimeInfo.from_run(self.info)

    @property
    def pool(self) -> str:
        """Return the pool's name, else the names of its policies."""
        return str(self.info.get("pool") or ", ".join(self.policies))

    @property
    def task(self) -> str:
        """Return the task's name."""
        return str(part(self.recipe, "task").get("name") or part(self.info, "fingerprint").get("task") or "unknown")

    @property
    def command(self) -> str:
        """Return the command that started the run."""
        arguments = self.info.get("command")
        return " ".join(map(str, arguments)) if isinstance(arguments, list) else "unknown"

    @property
    def data(self) -> str:
        """Return what it trained on and validated on; empty for a run that did not record it."""
        try:
            return data_note(self.info["data"])
        except (KeyError, TypeError, ValueError):
            return ""

    @property
    def by_scripts(self) -> bool:
        """Return whether users' own scripts train its policies."""
        return self.info.get("scripts") is True

    @property
    def planned_steps(self) -> int | None:
        """Return the planned number of steps."""
        steps = part(self.recipe, "run").get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def measures_accuracy(self) -> bool:
        """Return whether validation measures accuracy rather than a mean reward."""
        return part(self.recipe, "task").get("reward", ["boxed"]) in ("boxed", ["boxed"])

    def success_above(self, policy: str) -> float:
        """Return the reward above which a rollout is a success for a policy's regime."""
        overrides = next((part(p, "regime") for p in policies_in(self.recipe) if p["name"] == policy), {})
        for section in (overrides, part(self.recipe, "regime")):
            for key, value in flat(section).items():  # for several regimes, nested under a name
                number = finite_number(value) if key.rpartition(".")[2] == "success_above" else None
                if number is not None:
                    return number
        return SUCCESS_ABOVE

    @property
    def arm(self) -> str:
        """Return the regime with its non-default settings, `sgt (weight=0.3)`, overrides of a policy, `sgt (bob:
        weight=0.9)`, and the sources that it reads, `sgt with book`."""
        overrides = {policy["name"]: part(policy, "regime") for policy in policies_in(self.recipe)}
        label = self.rule.label(part(self.recipe, "regime"), overrides)
        sources = ", ".join(sorted({**part(self.info, "sources"), **part(self.info, "asked_sources")}))
        return f"{label} with {sources}" if sources else label

    @property
    def is_variant(self) -> bool:
        """Return whether the arm is an ablation or a control of a regime for any policy."""
        common = part(self.recipe, "regime")
        sections = [common, *({**common, **part(policy, "regime")} for policy in policies_in(self.recipe))]
        return any(self.rule.is_variant(section) for section in sections)


def read_run(path: Path, *, logs: bool = True) -> Run:
    """Read a run directory in any state; without metrics and rescues if not `logs`. Raises UsageError if it is not a
    run directory, FileDamagedError if its run.json is damaged."""
    root = user_path(path)
    run = RunDirectory(root)
    info, notes = _info(run, path), []
    version = info.get("format", 0)
    if version != FORMAT:
        notes.append(
            f"it was written in format {version!r} (mutualrl {part(info, 'versions').get('mutualrl', 'unknown')}), "
            f"this version reads {FORMAT}: only compatible data is shown"
        )
    summary = _summary(run, info, notes)  # before the policies: a run that ends meanwhile counts as running
    recipe = _recipe(run, info, notes)
    models = {policy["name"]: str(policy.get("model", "")) for policy in policies_in(recipe)}
    names = sorted(p.name for p in (root / "policies").glob("*") if p.is_dir() and POLICY.fullmatch(p.name))
    policies, rule = {}, RegimeInfo.from_run(info)
    for name in dict.fromkeys([*models, *names]):
        files = run.policy(name)
        result = _checked(files.result, info, notes, root) or part(part(summary or {}, "policies"), name) or None
        metrics: tuple[Row, ...] = ()
        rescues: tuple[Row, ...] = ()
        if logs:
            sums = recorded_sums(files)
            metrics = _lines(files.metrics, sums.get(files.metrics), notes, root)
            rescues = _lines(files.rescues, sums.get(files.rescues), notes, root)
            notes += [f"{name}: {note}" for note in LearningNotes.of(rule.metrics, metrics).notes()]
            notes += unscorable_note(name, part(result or {}, "validation"))
            limit = part(recipe, "task").get("max_prompt_tokens")
            notes += [note for note in data_notes(run, name, limit) if note not in notes]
            if not metrics:
                notes.append(f"policy {name!r} has no step in its metrics.jsonl yet")
        if summary is not None and result is None:
            problem = "was lost during the run" if name in (summary.get("lost") or ()) else "has no readable result"
            notes.append(f"policy {name!r} {problem}: its curve ends at its last step and it has no final accuracy")
        policies[name] = PolicyRun(
            name, models.get(name, ""), metrics, rescues, _checked(files.before, info, notes, root), result, rule
        )
    if not policies:
        notes.append("it has no policies: it ended before any of them started")
    state = _state(run, summary, notes, list(policies) if info.get("scripts") is True else ())
    if not (root / "exchange").is_dir() and not info.get("exchange"):
        notes.append("it has no exchange: published data is not shown")
    evaluations = _evaluations(run, info, notes)
    return Run(root, root.name, info, recipe, policies, summary, state, tuple(notes), evaluations)


def _info(run: RunDirectory, path: Path) -> Row:
    try:
        info = read_run_json(run.run_json)
    except OSError as error:
        raise UsageError(
            f"{path} is not a run directory (run.json cannot be read: {error.strerror or error})"
        ) from None
    if info is None and not path.exists():
        raise UsageError(
            f"{path} is not a run directory: it does not exist; `mutualrl train --run-dir {path}` creates one"
        )
    if info is None:
        raise UsageError(f"{path} is not a run directory (it has no run.json); expected the output of `mutualrl train`")
    return info


def _checked(path: Path, info: Row, notes: list[str], root: Path) -> Row | None:
    """Return a small JSON file of a run after verifying its checksum; None if it is missing or damaged (noted). Runs in
    older formats have no checksums."""
    try:
        return read_checksummed(path, root=root) if info.get("format") == FORMAT else read_json(path)
    except (FileDamagedError, OSError) as error:
        notes.append(f"{path.relative_to(root)} is left out: {_short(error, path)}")
        return None


def _short(error: Exception, path: Path) -> str:
    return str(error).removeprefix(f"{path}: ")


@dataclass(frozen=True, slots=True)
class PolicyOverview:
    """Progress of a policy: last step, accuracy before training, and last measured accuracy."""

    step: int
    before: float | None
    last: float | None


@dataclass(frozen=True, slots=True)
class Overview:
    """Summary of a run for a list of runs."""

    run: Run
    policies: Mapping[str, PolicyOverview]
    has_checkpoint: bool = False


def read_overview(path: Path) -> Overview:
    """Return a run without its metrics, and each policy's progress from the tails of its files: logs are hashed but not
    parsed. Raises as `read_run` does."""
    run = read_run(path, logs=False)
    policies, notes = {}, list(run.notes)
    for name, policy in run.policies.items():
        files = RunDirectory(run.root).policy(name)
        metrics = files.metrics
        try:
            if (recorded := recorded_sums(files).get(metrics)) is not None:
                verify_log(metrics, recorded)
        except (FileDamagedError, OSError) as error:
            notes.append(f"{metrics.relative_to(run.root)} is left out: {_short(error, metrics)}")
            policies[name] = PolicyOverview(0, None, policy.final)
            continue
        accuracy = policy.accuracy()
        before = accuracy[0].value if accuracy and accuracy[0].step == 0 else None
        step, last = _ends(metrics, needs_accuracy=policy.final is None)
        measured = [value for value in (policy.final, last, before) if value is not None]
        policies[name] = PolicyOverview(step, before, measured[0] if measured else None)
    has_checkpoint = any(Checkpoints(RunDirectory(run.root).policy(name).root).steps() for name in run.policies)
    return Overview(replace(run, notes=tuple(notes)), policies, has_checkpoint)


def _ends(path: Path, *, needs_accuracy: bool) -> tuple[int, float | None]:
    """Return the last step in a metrics.jsonl and, if needed, the last validation accuracy, read from its end."""
    step, size = 0, TAIL_BYTES
    while True:
        data, complete = _tail(path, size)
        parsed = [parse_or_none(line) for line in data.split(b"\n")]
        rows = [row for row in parsed if row is not None and type(row.get("step")) is int]
        step = rows[-1]["step"] if rows else step
        validations = [validation_of(row.get("validation")) for row in rows]
        accuracies = [validation["accuracy"] for validation in validations if validation is not None]
        if accuracies or complete or (rows and not needs_accuracy):
            return step, accuracies[-1] if accuracies else None
        size *= 8


TAIL_BYTES = 64 * 1024


def _tail(path: Path, size: int) -> tuple[bytes, bool]:
    """Return the complete lines in the last `size` bytes of a regular file, and whether these cover the file."""
    try:
        with open_regular(path) as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - size))
            data = file.read(size)
    except (FileDamagedError, OSError):
        return b"", True
    begin = data.find(b"\n") + 1 if length > size else 0
    return data[begin : data.rfind(b"\n") + 1], length <= size


def part(tree: Mapping[str, Any], key: str) -> JsonObject:
    """Return a section of a tree; empty if it is missing or not a mapping."""
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def validation_of(value: Any) -> Row | None:
    """Return `{"accuracy", "by_group"}` of a recorded validation; None for anything else, and for a validation in which
    no completion had a reward."""
    if isinstance(value, dict) and value.get("unscorable") and value["unscorable"] == value.get("n"):
        return None
    return _recorded_validation(value)


def _recorded_validation(value: Any) -> Row | None:
    accuracy = finite_number(value.get("accuracy")) if isinstance(value, dict) else None
    if accuracy is None or not isinstance(value.get("by_group"), dict):
        return None
    groups = {str(group): finite_number(number) for group, number in value["by_group"].items()}
    by_group = {group: number for group, number in groups.items() if number is not None}
    return {"accuracy": accuracy, "by_group": by_group}


def _evaluations(run: RunDirectory, info: Row, notes: list[str]) -> tuple[Evaluation, ...]:
    """Return the results of `mutualrl eval --run` in the run; unreadable ones are noted."""
    results = []
    for path in sorted(run.evaluations.glob("*.json")):
        value = _checked(path, info, notes, run.root)
        if value is None:
            continue
        evaluation = _evaluation(value)
        if evaluation is None:
            notes.append(f"{path.relative_to(run.root)} is left out: not an output of `mutualrl eval --run`")
        else:
            results.append(evaluation)
    return tuple(results)


def _evaluation(value: Row) -> Evaluation | None:
    tasks = part(value, "tasks")
    accuracy: dict[str, dict[str, float]] = {}
    pass_at: dict[str, dict[str, float]] = {}
    models = part(value, "models")
    for policy in models:
        result = part(models, policy)
        by_task = part(result, "tasks")
        accuracy[str(policy)] = _finite({task: part(by_task, task).get("accuracy") for task in tasks})
        pass_at[str(policy)] = _finite(part(result, "pass_at_k"))
    if not tasks or not accuracy or not all(isinstance(task, dict) for task in tasks.values()):
        return None
    decoding = {key: value.get(key) for key in ("suite", "samples", "temperature", "seed")}
    sizes = {name: [task.get("n"), task.get("max_new_tokens")] for name, task in sorted(tasks.items())}
    how, initial = json.dumps([decoding, sizes], default=str), value.get("initial") is True
    return Evaluation(how, tuple(map(str, tasks)), accuracy, pass_at, initial)


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: finite_number(value) for key, value in values.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def policies_in(recipe: Row) -> list[Row]:
    """Return the policies of a recipe with valid names, which are used as directory names."""
    value = recipe.get("policies")
    entries = value if isinstance(value, list) else []
    return [
        p for p in entries if isinstance(p, dict) and isinstance(p.get("name"), str) and POLICY.fullmatch(p["name"])
    ]


def _summary(run: RunDirectory, info: Row, notes: list[str]) -> Row | None:
    """Return the summary of a finished run; None for an unfinished run or an unreadable summary, which is noted."""
    summary = _checked(run.summary, info, notes, run.root)
    results = [] if summary is None else list(part(summary, "policies").values())
    if results and all(_has_validations(result) for result in results):
        return summary
    if summary is not None:
        notes.append("its summary.json cannot be read")
    return None


def _has_validations(result: Any) -> bool:
    keys = ("initial_validation", "validation")
    return isinstance(result, dict) and all(_recorded_validation(result.get(key)) for key in keys)


def _recipe(run: RunDirectory, info: Row, notes: list[str]) -> Row:
    """Return the recipe in run.json, or in recipe.yaml for older formats."""
    text = info.get("recipe")
    try:
        if not isinstance(text, str) or not text:
            return yaml_file.read(run.recipe)
        if try_read_bytes(run.recipe) != text.encode():
            notes.append("its recipe.yaml is missing or was changed: the recipe in its run.json is shown")
        return yaml_file.parse_mapping(text, str(run.run_json))
    except RecipeError:
        notes.append("its recipe.yaml is missing or cannot be read")
        return {}


def _lines(path: Path, recorded: FileDigest | None, notes: list[str], root: Path) -> tuple[Row, ...]:
    """Return the rows of a JSON Lines file that have a step; none if the recorded prefix fails its checksum. An
    unterminated last line is still being written, or was torn."""
    where = path.relative_to(root)
    try:
        data = read_regular(path, LARGEST_LOG)
    except FileNotFoundError:
        return ()
    except (OSError, FileDamagedError) as error:
        notes.append(f"{where} is left out: {_short(error, path)}")
        return ()
    if recorded is not None and hashlib.sha256(data[: recorded.bytes]).hexdigest() != recorded.sha256:
        notes.append(f"{where} is left out: its bytes do not match its checksum")
        return ()
    rows: list[Row] = []
    bad: list[int] = []
    for line, text in enumerate(data.split(b"\n")[:-1], 1):
        row = parse_or_none(text)
        if row is not None and type(row.get("step")) is int:
            rows.append(row)
        else:
            bad.append(line)
    if data and not data.endswith(b"\n"):
        notes.append(f"{where}: its last line is incomplete (being written, or torn by a kill) and is left out")
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{where}: {len(bad)} lines are not valid records ({shown}) and are left out")
    return tuple(rows)


def _state_of_scripts(run: RunDirectory, policies: Sequence[str], notes: list[str]) -> RunState:
    """Return the state of a run whose policies are trained by users' own scripts."""
    if any(holder_of(run.policy(name).lock) for name in policies):
        notes.append("it is still running: this page shows its state at the time of the report")
        return RunState.RUNNING
    unfinished = [name for name in policies if not run.policy(name).result.exists()]
    if not unfinished:
        return RunState.FINISHED
    notes.append(
        f"the script of {', '.join(unfinished)} ended before its last step, or has not begun; resume it with "
        "Sharing.over(..., resume=True) and train(resume_from_checkpoint=True)"
    )
    return RunState.ENDED


def _state(run: RunDirectory, summary: Row | None, notes: list[str], scripts: Sequence[str] = ()) -> RunState:
    if summary is not None:
        return RunState.FINISHED
    if scripts:
        return _state_of_scripts(run, scripts, notes)
    try:
        holder = holder_of(run.lock)
    except OSError as error:
        notes.append(f"cannot determine whether it is running ({error.strerror}: {run.lock.name})")
        return RunState.UNKNOWN
    if holder is not None:
        notes.append("it is still running: this page shows its state at the time of the report")
        return RunState.RUNNING
    outcome = (try_read_json(status_file(run.root)) or {}).get("outcome")
    if not isinstance(outcome, str):
        notes.append(
            "it ended without a final status (killed, or on another machine); `mutualrl train --resume` resumes it"
        )
        return RunState.ENDED
    if outcome == RunState.FINISHED:
        notes.append("it finished but has no readable summary")
        return RunState.ENDED
    kind, _, message = outcome.partition(": ")
    if kind == ELSEWHERE:
        notes.append(message)
        return RunState.ELSEWHERE
    notes.append(f"it ended before its last step: {message or kind}")
    return RunState.STOPPED if kind == RunInterruptedError.kind else RunState.FAILED
