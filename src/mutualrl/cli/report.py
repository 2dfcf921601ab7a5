"""`mutualrl report`: the HTML report of one run, or of several side by side."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.console.display import print_text


@reports_errors
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run directories in any state, URLs of runs in a bucket, `distill` directories.",
            show_default=False,
            autocompletion=run_directories,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output directory; RUN/report for a single run (RUN-report for one in a bucket), else report.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write an HTML report of runs: curves, rescues, regimes side by side, the paper's figures. Works offline.

    Example: mutualrl report runs/grpo-0 runs/sgt-0 --out page
    """
    from mutualrl.console.display import clean
    from mutualrl.reporting.remote_run import run_directory, run_name
    from mutualrl.reporting.report import write_report
    from mutualrl.storage.bucket_url import is_bucket
    from mutualrl.storage.files import user_path
    from mutualrl.storage.rundir import command_line
    from mutualrl.study.verdict import verdicts

    target = out or Path("report")
    if out is None and len(runs) == 1:
        target = Path(f"{run_name(runs[0])}-report") if is_bucket(runs[0]) else user_path(Path(runs[0])) / "report"
    with ExitStack() as fetched:
        directories = [fetched.enter_context(run_directory(run)) for run in runs]
        written = write_report(directories, target, " ".join(command_line()), verdicts)
    for note in written.notes:
        print_text(prose(), f"Note: {note}")
    if as_json:
        emit({"page": str(written.page), "figures": written.figures, "notes": list(written.notes)})
    else:
        typer.echo(clean(str(written.page), 4096))
