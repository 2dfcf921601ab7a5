"""A run as its files tell it: finished, still going on, stopped or broken. Nothing is repaired, nothing is guessed:
what cannot be read is said in `notes`, and the rest is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mutualrl.errors import UsageError
from mutualrl.files import glance, user_path
from mutualrl.regimes import get_regime
from mutualrl.rundir import FORMAT, RunDirectory, holder_of
from mutualrl.standing import node_file

Row = dict[str, Any]


class Point(NamedTuple):
    """A value at an optimizer step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy of a run. `metrics`: the lines of metrics.jsonl; `before`: its validation before training; `result`:
    its result.json, None until its end."""

    name: str
    model: str
    metrics: tuple[Row, ...]
    rescues: tuple[Row, ...]
    before: Row | None
    result: Row | None

    def series(self, key: str) -> list[Point]:
        """The finite values of a metric, by step."""
        return [Point(row["step"], value) for row in self.metrics if (value := number(row.get(key))) is not None]

    def validations(self) -> list[tuple[int, Row]]:
        """Greedy validation by step: before training (step 0), during it, and at its end."""
        found = {row["step"]: row["validation"] for row in self.metrics if _is_validation(row.get("validation"))}
        if _is_validation(self.before):
            found[0] = self.before
        if self.result is not None:
            if _is_validation(first := self.result.get("initial_validation")):
                found[0] = first
            if _is_validation(last := self.result.get("validation")) and isinstance(self.result.get("steps"), int):
                found[self.result["steps"]] = last
        return sorted(found.items())

    def accuracy(self, group: str | None = None) -> list[Point]:
        """Validation accuracy by step, of a group or of all."""
        points = []
        for step, found in self.validations():
            value = number(found["accuracy"] if group is None else found["by_group"].get(group))
            if value is not None:
                points.append(Point(step, value))
        return points

    @property
    def groups(self) -> list[str]:
        """The groups that accuracy is reported by."""
        return sorted({str(group) for _, found in self.validations() for group in found["by_group"]})

    @property
    def steps(self) -> int:
        """The last step that it wrote down."""
        return self.metrics[-1]["step"] if self.metrics else 0


@dataclass(frozen=True, slots=True)
class Run:
    """A run. `name`: its directory's, or more of its path where two have the same. `state`: finished, running, stopped,
    failed or ended; `notes`: what is wrong or missing, in words."""

    root: Path
    name: str
    info: Row
    recipe: Row
    policies: Mapping[str, Policy]
    summary: Row | None
    state: str
    notes: tuple[str, ...]

    @property
    def seed(self) -> Any:
        """The run's seed."""
        return self.info.get("seed")

    @property
    def regime(self) -> str:
        """The regime's name."""
        return str(self.info.get("regime", "unknown"))

    @property
    def pool(self) -> str:
        """The pool's name, or its policies."""
        return str(self.info.get("pool") or ", ".join(self.policies))

    @property
    def task(self) -> str:
        """The task's name."""
        return str(part(self.recipe, "task").get("name") or part(self.info, "fingerprint").get("task") or "unknown")

    @property
    def command(self) -> str:
        """The command that began it."""
        words = self.info.get("command")
        return " ".join(map(str, words)) if isinstance(words, list) else "unknown"

    @property
    def planned_steps(self) -> int | None:
        """How many steps it was to make."""
        steps = part(self.recipe, "run").get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def arm(self) -> str:
        """The regime, with those of its settings that are not the defaults: `sgt (weight=0.3)`."""
        given = {key: value for key, value in part(self.recipe, "regime").items() if key != "name"}
        try:
            defaults = get_regime(self.regime).settings().model_dump()
        except UsageError:  # of a version that knows more regimes, or of something else than mutualrl
            return self.regime
        told = [f"{key}={value}" for key, value in sorted(given.items()) if defaults.get(key, value) != value]
        return f"{self.regime} ({', '.join(told)})" if told else self.regime


def read_run(path: Path) -> Run:
    """A run's directory, in whatever state. Raises UsageError when it is none."""
    root = user_path(path)
    run = RunDirectory(root)
    info = glance(run.run_json)
    if info is None:
        what = "run.json cannot be read" if run.run_json.exists() else "it has no run.json"
        raise UsageError(f"{path} is not a run directory ({what}); expected what `mutualrl train` leaves")
    notes = []
    version = info.get("format", 0)
    if version != FORMAT:
        notes.append(
            f"it was written in format {version!r} (mutualrl {part(info, 'versions').get('mutualrl', 'unknown')}), "
            f"this "
            f"version reads {FORMAT}: what it has in this form is shown"
        )
    recipe = _recipe(run.recipe, notes)
    names = [str(p["name"]) for p in recipe.get("policies") or () if isinstance(p, dict) and "name" in p]
    models = {str(p["name"]): str(p.get("model", "")) for p in recipe.get("policies") or () if isinstance(p, dict)}
    found = sorted(p.name for p in (root / "policies").glob("*") if p.is_dir())
    policies = {}
    for name in dict.fromkeys([*names, *found]):
        files = run.policy(name)
        metrics = _lines(files.metrics, notes, root)
        if not metrics:
            notes.append(f"policy {name!r} has no step in its metrics.jsonl yet")
        rescues = _lines(files.rescues, notes, root)
        policies[name] = Policy(
            name, models.get(name, ""), metrics, rescues, glance(files.before), glance(files.result)
        )
    if not policies:
        notes.append("it has no policies: it ended before any of them began")
    summary = glance(run.summary)
    state = _state(run, summary, notes)
    if not (root / "exchange").is_dir():
        notes.append("it has no exchange: nothing that the policies published is shown")
    return Run(root, root.name, info, recipe, policies, summary, state, tuple(notes))


def part(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A section of a file that may lack it."""
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _is_validation(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and number(value.get("accuracy")) is not None
        and isinstance(value.get("by_group"), dict)
    )


def _recipe(path: Path, notes: list[str]) -> Row:
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        value = None
    if not isinstance(value, dict):
        notes.append("its recipe.yaml is missing or cannot be read")
        return {}
    return value


def _lines(path: Path, notes: list[str], root: Path) -> tuple[Row, ...]:
    """The rows of a JSON Lines file that have a step. A last line without its end is being written, or was torn."""
    try:
        data = path.read_bytes()
    except OSError:
        return ()
    rows: list[Row] = []
    bad: list[int] = []
    for line, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        else:
            bad.append(line)
    where = path.relative_to(root)
    if data and not data.endswith(b"\n"):
        notes.append(f"{where}: its last line has no end (being written, or torn by a kill); it is left out")
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{where}: {len(bad)} lines are no records ({shown}); they are left out")
    return tuple(rows)


def _state(run: RunDirectory, summary: Row | None, notes: list[str]) -> str:
    if summary is not None:
        return "finished"
    if holder_of(run.lock(0)) is not None:
        notes.append("it is still going on: this page shows it as it was when the page was made")
        return "running"
    outcome = (glance(node_file(run.root, 0)) or {}).get("outcome")
    if not isinstance(outcome, str):
        notes.append("it ended without a last word (killed, or on another machine); `mutualrl train --resume` goes on")
        return "ended"
    kind, _, words = outcome.partition(": ")
    notes.append(f"it ended before its last step: {words or kind}")
    return "stopped" if kind == "interrupted" else "failed"
