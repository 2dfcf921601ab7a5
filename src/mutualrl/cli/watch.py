"""`mutualrl watch`: follow a live run from another terminal or another machine."""

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
from mutualrl.console.display import clean, print_text
from mutualrl.process.status import RunState

if TYPE_CHECKING:
    from mutualrl.reporting.run_reader import Run
    from mutualrl.storage.rundir import RunDirectory

LOCAL_SECONDS = 0.5  # between two polls
REMOTE_SECONDS = 10.0  # between two polls of a bucket


@reports_errors
def watch(
    run: Annotated[
        str,
        typer.Argument(
            help="The run directory, or its URL in a bucket.", show_default=False, autocompletion=run_directories
        ),
    ],
    plain: Annotated[bool, typer.Option("--plain", help="A table instead of the screen; in a pipe, lines.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Follow a run: curves, gate, waiting, newest rescues, logs. In a pipe: a line every few seconds until it ends.

    With --json: its current state, once. For a run in a bucket: the files that its policies mirror there, every minute
    by default. Example: mutualrl watch runs/sgt
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
        current = read_run(path, logs=False)
        directory = RunDirectory(current.root)

        def is_live() -> bool:
            if not remote:
                locks = [directory.lock, *(directory.policy(name).lock for name in current.policies)]
                return any(holder_of(lock) is not None for lock in locks)
            fetch_run(run, path)
            return not directory.summary.exists()

        if current.state in (RunState.RUNNING, RunState.ELSEWHERE):
            terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
            follow = _follow_on_screen if terminal and not plain else _follow_lines
            follow(run, current, is_live, REMOTE_SECONDS if remote else LOCAL_SECONDS)
            current = read_run(path, logs=False)
        if current.state in (RunState.RUNNING, RunState.ELSEWHERE):  # the user left the screen
            print_text(screen(), f"{run} is still running")
        elif current.by_scripts and current.state == RunState.FINISHED:
            print_text(screen(), f"{run} has finished; its scripts measure no accuracy. See: mutualrl report {run}")
        elif current.summary is None or current.state != RunState.FINISHED:
            raise MutualRLError(f"the run {clean(run)} is {current.state}: {'; '.join(current.notes)}")
        else:
            show_summary(current.summary, run if remote else current.root)


def _follow_lines(source: str, current: Run, is_live: Callable[[], bool], seconds: float) -> None:
    from mutualrl.reporting.progress import Progress
    from mutualrl.storage.rundir import RunDirectory

    metrics = current.rule.metrics
    directory = RunDirectory(current.root)
    with Progress(directory, list(current.policies), current.planned_steps or 0, screen(), metrics) as progress:
        while is_live():
            progress.update()
            time.sleep(seconds)


def _follow_on_screen(source: str, current: Run, is_live: Callable[[], bool], seconds: float) -> None:
    from mutualrl.cli.watch_screen import WatchScreen
    from mutualrl.errors import MutualRLError
    from mutualrl.reporting.live_run import LiveRun
    from mutualrl.reporting.remote_run import run_name
    from mutualrl.reporting.report import write_report
    from mutualrl.storage.bucket_url import is_bucket
    from mutualrl.storage.rundir import RunDirectory, command_line
    from mutualrl.study.verdict import verdicts

    remote = is_bucket(source)
    directory = RunDirectory(current.root)
    local = [name for name in current.policies if directory.policy(name).root.is_dir()]
    joined = current.info.get("exchange") and local  # its directory has only its own policy
    names = local if joined else list(current.policies)
    live = LiveRun(directory, names, current.rule.metrics)

    def report() -> Path:
        out = Path.cwd() / f"{run_name(source)}-report" if remote else directory.root / "report"
        return write_report([directory.root], out, " ".join(command_line()), verdicts).page

    title = clean(
        f"{run_name(source) if remote else current.name} · {current.arm} · {current.pool} · seed {current.seed}", 200
    )
    app = WatchScreen(
        live,
        title=title,
        measure="greedy accuracy" if current.measures_accuracy else "mean reward, greedy",
        steps=current.planned_steps or 0,
        seconds=max(1.0, seconds),
        look=is_live,
        stop=None if remote else lambda: stop_run(directory),
        report=report,
    )
    app.run()
    if app.return_code:
        raise MutualRLError("the screen failed (see above); the run continues. Use instead: mutualrl watch --plain")


def stop_run(run: RunDirectory) -> str:
    """Send a stop request to a run's supervisor, and return a message. Raises UsageError if the run has ended."""
    from mutualrl.errors import UsageError
    from mutualrl.launch.stop import write_stop_request
    from mutualrl.storage.rundir import holder_of

    holder = holder_of(run.lock)
    if holder is None:
        raise UsageError("the run has already ended")
    write_stop_request(run)
    return f"Stop request sent to {clean(holder, 200)}: each policy finishes its step and saves a checkpoint"
