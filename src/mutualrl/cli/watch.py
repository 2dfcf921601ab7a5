"""`mutualrl watch`: a live run, from another terminal or another machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, reports_errors, screen
from mutualrl.cli.results import run_row
from mutualrl.console.display import clean

if TYPE_CHECKING:
    from mutualrl.reporting.run_reader import Run
    from mutualrl.storage.rundir import RunDirectory

LOCAL_SECONDS = 0.5  # between two looks
REMOTE_SECONDS = 10.0  # at a bucket


@reports_errors
def watch(
    run: Annotated[
        str,
        typer.Argument(
            help="The run's directory, or its URL in a bucket.", show_default=False, autocompletion=run_directories
        ),
    ],
    plain: Annotated[bool, typer.Option("--plain", help="A table in place of the screen; in a pipe, lines.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Follow a run: curves, gate, waiting, newest rescues, logs. In a pipe: a line every few seconds until it ends.

    With --json: how it stands now, once. Of a run in a bucket it shows what its policies mirror there, every minute by
    default. Example: mutualrl watch runs/sgt
    """
    from mutualrl.cli.results import show_summary
    from mutualrl.errors import MutualRLError
    from mutualrl.reporting.remote_run import fetch_run, run_directory
    from mutualrl.reporting.run_reader import read_overview, read_run
    from mutualrl.storage.bucket_url import is_bucket
    from mutualrl.storage.rundir import RunDirectory, holder_of

    remote = is_bucket(run)
    with run_directory(run) as path:
        if as_json:
            emit({**run_row(read_overview(path)), "run": run if remote else str(path)})
            return
        read = read_run(path, logs=False)
        directory = RunDirectory(read.root)

        def is_live() -> bool:
            if not remote:
                return holder_of(directory.lock) is not None
            fetch_run(run, path)
            return not directory.summary.exists()

        if read.state in ("running", "elsewhere"):
            terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
            follow = _on_screen if terminal and not plain else _lines
            follow(run, read, is_live, REMOTE_SECONDS if remote else LOCAL_SECONDS)
            read = read_run(path, logs=False)
        if read.state in ("running", "elsewhere"):  # the screen was left
            screen().print(f"{run} is still running", markup=False, highlight=False, soft_wrap=True)
        elif read.summary is None or read.state != "finished":
            raise MutualRLError(f"the run {clean(run)} is {read.state}: {'; '.join(read.notes)}")
        else:
            show_summary(read.summary, run if remote else read.root)


def _lines(where: str, read: Run, is_live: Callable[[], bool], seconds: float) -> None:
    from mutualrl.reporting.progress import Progress
    from mutualrl.storage.rundir import RunDirectory

    gate_key = read.rule.metric("gate_rate")
    directory = RunDirectory(read.root)
    with Progress(directory, list(read.policies), read.planned_steps or 0, screen(), gate_key) as progress:
        while is_live():
            progress.update()
            time.sleep(seconds)


def _on_screen(where: str, read: Run, is_live: Callable[[], bool], seconds: float) -> None:
    from mutualrl.cli.watch_screen import WatchScreen
    from mutualrl.errors import MutualRLError
    from mutualrl.reporting.live_run import LiveRun
    from mutualrl.reporting.remote_run import run_name
    from mutualrl.reporting.report import write_report
    from mutualrl.storage.bucket_url import is_bucket
    from mutualrl.storage.rundir import RunDirectory, command_line
    from mutualrl.study.verdict import verdicts

    remote = is_bucket(where)
    directory = RunDirectory(read.root)
    here = [name for name in read.policies if directory.policy(name).root.is_dir()]
    names = here if read.info.get("exchange") and here else list(read.policies)  # one that joined follows its own alone
    live = LiveRun(directory, names, read.rule.metric("gate_rate"))

    def report() -> Path:
        out = Path.cwd() / f"{run_name(where)}-report" if remote else directory.root / "report"
        return write_report([directory.root], out, " ".join(command_line()), verdicts).page

    title = clean(f"{run_name(where) if remote else read.name} · {read.arm} · {read.pool} · seed {read.seed}", 200)
    app = WatchScreen(
        live,
        title=title,
        measure="greedy accuracy" if read.measures_accuracy else "mean reward, greedy",
        steps=read.planned_steps or 0,
        seconds=max(1.0, seconds),
        look=is_live,
        stop=None if remote else lambda: stop_run(directory),
        report=report,
    )
    app.run()
    if app.return_code:
        raise MutualRLError("the screen broke off (above); the run continues. In its place: mutualrl watch --plain")


def stop_run(run: RunDirectory) -> str:
    """Ask the supervisor of a run to save and end; return what was done. Raises UsageError where the run has ended."""
    from mutualrl.errors import UsageError
    from mutualrl.mwra.stop import write_stop_request
    from mutualrl.storage.rundir import holder_of

    holder = holder_of(run.lock)
    if holder is None:
        raise UsageError("the run has ended already")
    write_stop_request(run)
    return f"Asked {clean(holder, 200)} to stop: each policy finishes its step and saves a checkpoint"
