"""`mutualrl report`: the HTML report of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import typer

from mutualrl.cli.commands import Report
from mutualrl.cli.output import emit, note_all
from mutualrl.console.display import clean
from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.paper.figures import across, figures
from mutualrl.reporting.report import ComparedRuns, WrittenReport, write_report
from mutualrl.runs.remote import run_place
from mutualrl.storage.bucket_url import is_bucket
from mutualrl.storage.rundir import command_line
from mutualrl.study.sweep_directory import SWEEP
from mutualrl.study.verdict import verdicts


def page_of(runs: Sequence[Path], out: Path, drawings: Path | None = None) -> WrittenReport:
    """Write the report of runs with the verdicts of the study and the paper's figures."""
    return write_report(runs, out, " ".join(command_line()), ComparedRuns(verdicts, figures, across), drawings)


def _runs_of(path: str) -> list[str]:
    """Return the runs of a sweep's directory; any other path itself. Raises UsageError for a sweep without runs."""
    root = None if is_bucket(path) else user_path(Path(path))
    if root is None or not (root / SWEEP).is_file():
        return [path]
    runs = sorted(str(found.parent) for found in root.glob("pieces/*/*/run.json"))
    if not runs:
        raise UsageError(f"{path}: the sweep has no run yet; start it again with: mutualrl sweep FILE --out {path}")
    return runs


def report(options: Report) -> None:
    """Write the report, and print the path of its page."""
    runs, target = [each for path in options.runs for each in _runs_of(path)], options.out or Path("report")
    with ExitStack() as fetched:
        places = [fetched.enter_context(run_place(run)) for run in runs]
        if options.out is None and len(options.runs) == 1:
            (given,) = options.runs
            target = places[0].page if runs == [given] else user_path(Path(given)) / "report"
        written = page_of([place.root for place in places], target, options.figures)
    note_all(written.notes)
    if options.as_json:
        emit({"page": str(written.page), "figures": written.figures, "notes": list(written.notes)})
    else:
        typer.echo(clean(str(written.page), 4096))
