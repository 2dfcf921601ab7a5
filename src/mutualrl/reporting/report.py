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
from mutualrl.reporting.charts import constants
from mutualrl.reporting.comparability import Comparison, comparisons
from mutualrl.reporting.distilled import RESULT, distillation_bars
from mutualrl.reporting.drawing import draw_figures
from mutualrl.reporting.figure_specs import Figure
from mutualrl.reporting.page import PageContent, PageSection, Verdict, render
from mutualrl.reporting.rescues import MANY
from mutualrl.reporting.sampled import collect_samples
from mutualrl.reporting.signs import Signs
from mutualrl.runs.logs import LoggedRun, points, read_runs
from mutualrl.storage.files import read_checksummed, write_atomic
from mutualrl.storage.rundir import RunDirectory

INDEX, DATA = "index.html", "report.json"
POINTS_OF_MANY = 200  # per curve, on a page of more than MANY runs


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


def write_report(
    paths: Sequence[Path], out: Path, command: str, compared: ComparedRuns, figures: Path | None = None
) -> WrittenReport:
    """Write `out`/index.html and report.json (all plotted values, the tables and the verdicts) for runs and for
    directories written by `mutualrl paper distill`; to `figures`, its figures as PNG and SVG files. Raises UsageError
    for any other path."""
    distilled = [user_path(path) for path in paths if (user_path(path) / RESULT).is_file()]
    runs = read_runs([path for path in paths if user_path(path) not in distilled])
    directory = directory_for(out, "--out")
    drawings = None if figures is None else directory_for(figures, "--figures")
    groups = comparisons(runs)
    sample_notes: list[str] = []
    samples = collect_samples(runs, sample_notes)
    sections = [_overview(runs, [*_general_notes(runs, groups), *sample_notes])]
    for number, comparison in enumerate(groups, 1):
        sections.append(_section(comparison, number, len(groups), compared.figures))
    if pools := compared.across(groups):
        sections.append(PageSection("Did it help in every pool?", (), (), pools))
    if bars := _distillations(distilled):
        sections.append(PageSection("Is sharing during training worth more than distilling after it?", (), (), bars))
    rescued = rescues.collect_rescues(groups)
    drawn = [*(figure for section in sections for figure in section.figures), *rescued.figures]
    signs = _signs(groups)
    verdicts = compared.verdicts(groups)
    provenance = [report_tables.commands(runs), *(report_tables.settings(run) for run in runs[:1])]
    title = f"{len(runs)} runs side by side" if runs else "Distillation"
    if len(runs) == 1:
        title = f"Run {runs[0].name}"
    page = PageContent(
        title=title,
        command=command,
        version=__version__,
        verdicts=verdicts,
        sections=sections,
        made=provenance,
        recipes=_recipes(runs, directory),
        rescued=rescued,
        samples=samples,
        signs=signs,
        runs=len(runs),
        most_points=None if len(runs) <= MANY else POINTS_OF_MANY,
    )
    text = render(page)
    if drawings is not None:
        draw_figures(drawn, drawings, signs)
    tables = [*(table for section in sections for table in section.tables), *rescued.tables, *provenance]
    data = json.dumps(_data(command, runs, drawn, verdicts, tables), allow_nan=False)
    write_atomic(directory / DATA, data.encode(), durable=False)
    write_atomic(directory / INDEX, text.encode("utf-8", "replace"))
    notes = [note for section in sections for note in section.notes]
    return WrittenReport(directory / INDEX, len(drawn), tuple(dict.fromkeys([*notes, *rescued.notes])))


def _overview(runs: Sequence[LoggedRun], notes: Sequence[str]) -> PageSection:
    return PageSection("Runs", notes, [report_tables.overview(runs)] if runs else [], [])


def _section(
    comparison: Comparison, number: int, of: int, compared: Callable[[Comparison, str], list[Figure]]
) -> PageSection:
    """Return the section of one comparison, the `number`th `of` all; of one run, if it has no other."""
    if len(comparison.runs) > 1:
        notes = [*comparison.notes, *(f"{run.name}: {note}" for run in comparison.runs for note in run.notes)]
        drawn, constant = constants(compared(comparison, f"{number}-{_slug(comparison.name)}"))
        tables = [report_tables.arms(comparison), constant]
        return PageSection(comparison.name, notes, [table for table in tables if table.rows], drawn)
    run = comparison.runs[0]
    prefix = "" if of == 1 else f"{number}-"
    drawn, constant = constants(single_run.figures(run))
    tables = [report_tables.accuracy(run), report_tables.sharing(run), report_tables.sources(run)]
    tables += [report_tables.asked_sources(run), report_tables.pace(run), constant]
    notes = [*run.notes, *report_tables.asked_notes(run)]
    renamed = [replace(figure, name=f"{prefix}{figure.name}") for figure in drawn]
    title = "What happened?" if of == 1 else f"Run {run.name}"
    return PageSection(title, notes, [table for table in tables if table.rows], renamed)


def _signs(groups: Sequence[Comparison]) -> Signs:
    """Return the signs of a report: of the arms of its comparisons, then of the policies."""
    arms = [arm for comparison in groups if len(comparison.runs) > 1 for arm in comparison.arms]
    return Signs([*arms, *(name for comparison in groups for run in comparison.runs for name in run.policies)])


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


def _data(
    command: str,
    runs: Sequence[LoggedRun],
    figures: Sequence[Figure],
    verdicts: Sequence[Verdict],
    tables: Sequence[report_tables.Table],
) -> dict[str, object]:
    return {
        "version": __version__,
        "command": command,
        "runs": list(map(_run_json, runs)),
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "figures": [figure.to_json() for figure in figures],
        "tables": [{"title": table.title, "head": table.head, "rows": table.rows} for table in tables],
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
