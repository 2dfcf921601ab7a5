"""`mutualrl report`: the HTML report of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import typer

from mutualrl.cli.commands import Report
from mutualrl.cli.output import emit, note_all
from mutualrl.console.display import clean
from mutualrl.paper.figures import across, figures
from mutualrl.reporting.report import Compared, write_report
from mutualrl.reporting.report import Report as Written
from mutualrl.runs.remote import run_directory, run_name
from mutualrl.storage.bucket_url import is_bucket
from mutualrl.storage.files import user_path
from mutualrl.storage.rundir import command_line
from mutualrl.study.verdict import verdicts


def page_of(runs: Sequence[Path], out: Path) -> Written:
    """Write the report of runs with the verdicts of the study and the paper's figures."""
    return write_report(runs, out, " ".join(command_line()), Compared(verdicts, figures, across))


def report(options: Report) -> None:
    """Write the report, and print the path of its page."""
    runs, target = options.runs, options.out or Path("report")
    if options.out is None and len(runs) == 1:
        target = Path(f"{run_name(runs[0])}-report") if is_bucket(runs[0]) else user_path(Path(runs[0])) / "report"
    with ExitStack() as fetched:
        directories = [fetched.enter_context(run_directory(run)) for run in runs]
        written = page_of(directories, target)
    note_all(written.notes)
    if options.as_json:
        emit({"page": str(written.page), "figures": written.figures, "notes": list(written.notes)})
    else:
        typer.echo(clean(str(written.page), 4096))
