"""Runs as read from their files: finished, running, stopped or damaged. Nothing is repaired or guessed: unreadable
parts are listed in `notes`, the rest is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from mutualrl.console.user_path import user_path
from mutualrl.errors import FileDamagedError, RecipeError, UsageError
from mutualrl.recipes import yaml_file
from mutualrl.runs.record import PolicyRecord, Run, StoredEvaluation, is_policy_name, policies_in
from mutualrl.runs.state import state_of
from mutualrl.storage.files import JsonObject, finite_number, read_checksummed, try_read_bytes
from mutualrl.storage.run_info import PolicyResult, RunInfo, Stored, Summary, Validation
from mutualrl.storage.rundir import RunDirectory, read_run_json

R = TypeVar("R", bound=Stored)


def read_run(path: Path) -> Run:
    """Read a run directory in any state, without its logs (`runs.logs.read_logged`). Raises UsageError if it is not a
    run directory, FileDamagedError if its run.json is damaged."""
    root = user_path(path)
    run, notes = RunDirectory(root), list[str]()
    stored = _run_json(run, path)
    info = _record(RunInfo, {"run_id": "", **stored}, run.run_json.name, notes) or RunInfo(run_id="")
    files = _Files(root, notes)
    summary = _summary(files, run)  # before the policies: a run that ends meanwhile counts as running
    recipe = _recipe(run, info, notes)
    models = {policy["name"]: str(policy.get("model", "")) for policy in policies_in(recipe)}
    names = sorted(p.name for p in (root / "policies").glob("*") if p.is_dir() and is_policy_name(p.name))
    policies = {}
    for name in dict.fromkeys([*models, *names]):
        of_policy = run.policy(name)
        result = files.read(PolicyResult, of_policy.result)
        if result is None and summary is not None:
            result = summary.policies.get(name)
        if summary is not None and result is None:
            problem = "was lost during the run" if name in summary.lost else "has no readable result"
            notes.append(f"policy {name!r} {problem}: its curve ends at its last step and it has no final accuracy")
        before = files.read(Validation, of_policy.before)
        policies[name] = PolicyRecord(name=name, model=models.get(name, ""), before=before, result=result)
    if not policies:
        notes.append("it has no policies: it ended before any of them started")
    state = state_of(run, summary, notes, list(policies) if info.scripts else ())
    if not (root / "exchange").is_dir() and not info.exchange:
        notes.append("it has no exchange: published data is not shown")
    return Run(
        root=root,
        name=root.name,
        info=info,
        recipe=recipe,
        policies=policies,
        summary=summary,
        state=state,
        evaluations=_evaluations(files, run),
        notes=tuple(notes),
        arm_name=_arm_name(run.root),
    )


def _arm_name(root: Path) -> str:
    """Return what a sweep calls the arm of its piece, from the outcome beside its directory; empty for other runs."""
    if root.parent.parent.name != "pieces":
        return ""
    try:
        stored = read_checksummed(root.with_name(f"{root.name}.json"), root=root.parent)
    except (FileDamagedError, OSError):  # the sweep's own commands report it
        return ""
    outcome = {} if stored is None else stored.get("outcome")
    name = outcome.get("arm") if isinstance(outcome, dict) else None
    return name if isinstance(name, str) else ""


def _run_json(run: RunDirectory, path: Path) -> JsonObject:
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


class _Files:
    """Small JSON files of a run."""

    def __init__(self, root: Path, notes: list[str]) -> None:
        self.root, self.notes = root, notes

    def object(self, path: Path) -> JsonObject | None:
        """Return a file's content after verifying its checksum; None if it is missing, or damaged (noted)."""
        try:
            return read_checksummed(path, root=self.root)
        except (FileDamagedError, OSError) as error:
            self.notes.append(f"{path.relative_to(self.root)} is left out: {short(error, path)}")
            return None

    def read(self, kind: type[R], path: Path) -> R | None:
        """Return a file's record; None if the file is missing, or not one (noted)."""
        value = self.object(path)
        return None if value is None else _record(kind, value, str(path.relative_to(self.root)), self.notes)


def _record(kind: type[R], value: JsonObject, where: str, notes: list[str]) -> R | None:
    """Return a record without the fields that are not valid, which are noted; None if a required one is not."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        wrong = {str(each["loc"][0]): each["msg"] for each in error.errors()}
    required = [name for name in wrong if (field := kind.model_fields.get(name)) is not None and field.is_required()]
    if required:
        notes.append(f"{where} is left out: {required[0]}: {wrong[required[0]]}")
        return None
    notes.append(f"{where}: left out of it: " + ", ".join(f"{name} ({text})" for name, text in wrong.items()))
    return kind.model_validate({name: field for name, field in value.items() if name not in wrong})


def validation_of(value: object) -> Validation | None:
    """Return the validation in a row of metrics.jsonl; None for anything else."""
    if value is None:  # of most rows
        return None
    try:
        return Validation.model_validate(value)
    except ValidationError:
        return None


def short(error: Exception, path: Path) -> str:
    """Return what is wrong with a file, without its path."""
    return str(error).removeprefix(f"{path}: ")


def _summary(files: _Files, run: RunDirectory) -> Summary | None:
    """Return the summary of a finished run; None for an unfinished run or an unreadable summary, which is noted."""
    summary = files.read(Summary, run.summary)
    if summary is None:
        return None
    if (summary.policies or run.info().joined_source) and all(
        policy.initial_validation and policy.validation for policy in summary.policies.values()
    ):
        return summary
    files.notes.append("its summary.json cannot be read")
    return None


def _recipe(run: RunDirectory, info: RunInfo, notes: list[str]) -> JsonObject:
    """Return the recipe in run.json."""
    try:
        if try_read_bytes(run.recipe) != info.recipe.encode():
            notes.append("its recipe.yaml is missing or was changed: the recipe in its run.json is shown")
        return yaml_file.parse_mapping(info.recipe, str(run.run_json))
    except RecipeError:
        notes.append("its recipe.yaml is missing or cannot be read")
        return {}


def _evaluations(files: _Files, run: RunDirectory) -> tuple[StoredEvaluation, ...]:
    """Return the results of `mutualrl eval --run` in the run; unreadable ones are noted."""
    results = []
    for path in sorted(run.evaluations.glob("*.json")):
        value = files.object(path)
        if value is None:
            continue
        evaluation = _evaluation(value)
        if evaluation is None:
            files.notes.append(f"{path.relative_to(run.root)} is left out: not an output of `mutualrl eval --run`")
        else:
            results.append(evaluation)
    return tuple(results)


def _evaluation(value: JsonObject) -> StoredEvaluation | None:
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
    return StoredEvaluation(
        how=json.dumps([decoding, sizes], default=str),
        tasks=tuple(map(str, tasks)),
        accuracy=accuracy,
        pass_at=pass_at,
        initial=value.get("initial") is True,
    )


def _finite(values: JsonObject) -> dict[str, float]:
    numbers = {key: finite_number(value) for key, value in values.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def part(tree: JsonObject, key: str) -> JsonObject:
    """Return a section of a tree; empty if it is missing or not a mapping."""
    value = tree.get(key)
    return value if isinstance(value, dict) else {}
