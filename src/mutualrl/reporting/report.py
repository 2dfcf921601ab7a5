"""Report on runs: read them, compare them, draw figures, write the page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mutualrl import __version__
from mutualrl.console.plots import directory_for
from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.reporting import report_tables, rescues, single_run
from mutualrl.reporting.comparability import Comparison, comparisons
from mutualrl.reporting.distilled import RESULT, distillation_bars
from mutualrl.reporting.drawing import draw_figure
from mutualrl.reporting.figure_specs import Figure
from mutualrl.reporting.page import PageSection, Verdict, render
from mutualrl.runs.logs import LoggedRun, points, read_runs
from mutualrl.storage.files import read_checksummed, try_read_json, write_atomic
from mutualrl.storage.rundir import RunDirectory

INDEX, DATA, FIGURES = "index.html", "report.json", "figures"


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """Written report: page, number of figures, warnings."""

    page: Path
    figures: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """What compares runs in a report: the verdicts on all comparisons, shown first; the figures of one, named with a
    prefix; and figures over all."""

    verdicts: Callable[[Sequence[Comparison]], Sequence[Verdict]]
    figures: Callable[[Comparison, str], list[Figure]]
    across: Callable[[Sequence[Comparison]], list[Figure]]


def write_report(paths: Sequence[Path], out: Path, command: str, compared: ComparedRuns) -> WrittenReport:
    """Write `out`/index.html, report.json (all plotted values) and figures/*.png, *.svg for runs and for directories
    written by `mutualrl paper distill`. Raises UsageError for any other path."""
    distilled = [user_path(path) for path in paths if (user_path(path) / RESULT).is_file()]
    runs = read_runs([path for path in paths if user_path(path) not in distilled])
    directory = directory_for(out, "--out")
    drawings = directory_for(directory / FIGURES, "--out")
    drawn: list[Figure] = []

    def drawing(figures: Sequence[Figure]) -> list[tuple[Figure, str]]:
        drawn.extend(figures)
        return [(figure, draw_figure(figure, drawings)) for figure in figures]

    groups = comparisons(runs)
    sections = [PageSection("Runs", _general_notes(runs, groups), [report_tables.overview(runs)] if runs else [], [])]
    for number, comparison in enumerate(groups, 1):
        if len(comparison.runs) == 1:
            run = comparison.runs[0]
            prefix = "" if len(groups) == 1 else f"{number}-"
            renamed = [replace(figure, name=f"{prefix}{figure.name}") for figure in single_run.figures(run)]
            tables = [report_tables.accuracy(run), report_tables.sharing(run), report_tables.sources(run)]
            tables += [report_tables.asked_sources(run), report_tables.pace(run)]
            tables = [table for table in tables if table.rows]
            notes = [*run.notes, *report_tables.asked_notes(run)]
            sections.append(PageSection(f"Run {run.name}", notes, tables, drawing(renamed)))
        else:
            slug = f"{number}-{_slug(comparison.name)}"
            notes = [*comparison.notes, *(f"{run.name}: {note}" for run in comparison.runs for note in run.notes)]
            tables = [report_tables.arms(comparison)]
            sections.append(PageSection(comparison.name, notes, tables, drawing(compared.figures(comparison, slug))))
    if pools := compared.across(groups):
        sections.append(PageSection("By pool", (), (), drawing(pools)))
    if bars := _distillations(distilled):
        sections.append(PageSection("Sequential distillation", (), (), drawing(bars)))
    rescued = rescues.collect_rescues(runs)
    provenance = [report_tables.commands(runs), *(report_tables.settings(run) for run in runs[:1])]
    title = f"{len(runs)} runs side by side" if runs else "Distillation"
    if len(runs) == 1:
        title = f"Run {runs[0].name}"
    page = render(
        title,
        command,
        __version__,
        compared.verdicts(groups),
        sections,
        provenance,
        _recipes(runs, directory),
        rescued,
        drawing(rescued.figures),
        several=len(runs) > 1,
    )
    _clear_stale(directory, {figure.name for figure in drawn})
    data = json.dumps(_data(command, runs, drawn), allow_nan=False)
    write_atomic(directory / DATA, data.encode(), durable=False)
    write_atomic(directory / INDEX, page.encode("utf-8", "replace"))
    notes = [note for section in sections for note in section.notes]
    return WrittenReport(directory / INDEX, len(drawn), tuple(dict.fromkeys([*notes, *rescued.notes])))


def _clear_stale(directory: Path, drawn: set[str]) -> None:
    """Remove the figures of a previous report in this directory that the new one does not have."""
    previous = (try_read_json(directory / DATA) or {}).get("figures")
    figures = previous if isinstance(previous, list) else []
    names = [figure.get("name") for figure in figures if isinstance(figure, dict)]
    for name in names:
        if isinstance(name, str) and name not in drawn and _slug(name) == name:
            for suffix in ("png", "svg"):
                (directory / FIGURES / f"{name}.{suffix}").unlink(missing_ok=True)


def _recipes(runs: Sequence[LoggedRun], directory: Path) -> list[tuple[str, str]]:
    """Return the runs whose recipes are on this machine, with each recipe's path relative to the page."""
    recipes = {run.name: RunDirectory(run.root).recipe for run in runs if not run.info.exchange}
    return [(name, os.path.relpath(path, directory)) for name, path in recipes.items() if path.is_file()]


def _general_notes(runs: Sequence[LoggedRun], groups: Sequence[Comparison]) -> list[str]:
    tasks = list(dict.fromkeys(run.task for run in runs))
    notes = []
    if len(tasks) > 1:
        notes.append(
            f"runs of different tasks ({', '.join(tasks)}) are not compared with each other; each is shown separately"
        )
    elif len(groups) > 1:
        summary = "; ".join(f"{c.name}: {len(c.runs)}" for c in groups)
        notes.append(f"runs of different pools or data are not compared with each other ({summary} runs)")
    return notes


def _distillations(paths: Sequence[Path]) -> list[Figure]:
    figures = []
    for number, path in enumerate(paths, 1):
        slug = "distillation" if len(paths) == 1 else f"distillation-{number}"
        figure = distillation_bars(path, read_checksummed(path / RESULT) or {}, slug)
        if figure is None:
            raise UsageError(f"{path / RESULT} cannot be read or has no bars; recreate it with: mutualrl paper distill")
        figures.append(figure)
    return figures


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")[:60]


def _data(command: str, runs: Sequence[LoggedRun], figures: Sequence[Figure]) -> dict[str, object]:
    return {
        "version": __version__,
        "command": command,
        "runs": list(map(_run_json, runs)),
        "figures": [figure.to_json() for figure in figures],
    }


def _run_json(run: LoggedRun) -> dict[str, object]:
    policies = {name: {"steps": run.steps[name], "validation": _validations(run, name)} for name in run.policies}
    return {
        "name": run.name,
        "path": str(run.root),
        "state": run.state,
        "arm": run.arm,
        "pool": run.pool,
        "task": run.task,
        "seed": run.seed,
        "command": run.command,
        "notes": list(run.notes),
        "policies": policies,
    }


def _validations(run: LoggedRun, policy: str) -> list[list[object]]:
    """Return [step, accuracy, accuracy by group] of every validation."""
    groups = {group: dict(points(run.accuracy_of(policy, group))) for group in run.groups(policy)}
    rows: list[list[object]] = []
    for step, accuracy in points(run.accuracy_of(policy)):
        rows.append([step, accuracy, {group: by_step[step] for group, by_step in groups.items() if step in by_step}])
    return rows
