"""`mutualrl watch`: a run as it goes on, from another terminal or another machine."""

from __future__ import annotations

import os
import signal
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
    plain: Annotated[bool, typer.Option("--plain", help="Lines in place of the screen, as in a pipe.")] = False,
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

        def goes_on() -> bool:
            if not remote:
                return holder_of(directory.lock) is not None
            fetch_run(run, path)
            return not directory.summary.exists()

        if read.state in ("running", "elsewhere"):
            terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
            follow = _on_screen if terminal and not plain else _lines
            follow(run, read, goes_on, REMOTE_SECONDS if remote else LOCAL_SECONDS)
            read = read_run(path, logs=False)
        if read.state in ("running", "elsewhere"):  # the screen was left
            screen().print(f"{run} goes on", markup=False, highlight=False, soft_wrap=True)
        elif read.summary is None or read.state != "finished":
            raise MutualRLError(f"the run {clean(run)} is {read.state}: {'; '.join(read.notes)}")
        else:
            show_summary(read.summary, run if remote else read.root)


def _lines(where: str, read: Run, goes_on: Callable[[], bool], seconds: float) -> None:
    from mutualrl.reporting.progress import Progress
    from mutualrl.storage.rundir import RunDirectory

    gate_key = read.rule.metric("gate_rate")
    directory = RunDirectory(read.root)
    with Progress(directory, list(read.policies), read.planned_steps or 0, screen(), gate_key) as progress:
        while goes_on():
            progress.update()
            time.sleep(seconds)


def _on_screen(where: str, read: Run, goes_on: Callable[[], bool], seconds: float) -> None:
    from mutualrl.cli.watch_screen import WatchScreen
    from mutualrl.reporting.live_run import LiveRun
    from mutualrl.reporting.remote_run import run_name
    from mutualrl.reporting.report import write_report
    from mutualrl.storage.bucket_url import is_bucket
    from mutualrl.storage.rundir import RunDirectory, command_line
    from mutualrl.study.verdict import verdicts

    remote = is_bucket(where)
    directory = RunDirectory(read.root)
    live = LiveRun(directory, list(read.policies), read.rule.metric("gate_rate"))

    def stop() -> str:
        return stop_run(directory.lock, where) if not remote else _not_from_here(where)

    def report() -> Path:
        out = Path.cwd() / f"{run_name(where)}-report" if remote else directory.root / "report"
        return write_report([directory.root], out, " ".join(command_line()), verdicts).page

    title = clean(f"{run_name(where) if remote else read.name} · {read.arm} · {read.pool} · seed {read.seed}", 200)
    WatchScreen(
        live,
        title=title,
        steps=read.planned_steps or 0,
        seconds=max(1.0, seconds),
        look=goes_on,
        stop=stop,
        report=report,
    ).run()


def _not_from_here(where: str) -> str:
    from mutualrl.errors import UsageError

    raise UsageError(f"{where}: each policy is stopped where it runs (Ctrl-C, or its scheduler's cancel)")


def stop_run(lock: Path, where: str) -> str:
    """Ask the supervisor that holds a run's lock to save and end, as Ctrl-C does there; return what was done. Raises
    UsageError where no process of this machine holds it: what the file says alone is not believed."""
    from mutualrl.errors import UsageError
    from mutualrl.storage.rundir import holder_of, holding_process

    holder = holder_of(lock)
    if holder is None:
        raise UsageError(f"{where}: it has ended already")
    pid = holding_process(lock)
    if pid is None:
        raise UsageError(
            f"{where}: its supervisor is {clean(holder, 200)}, which is not on this machine; stop it there"
        )
    os.kill(pid, signal.SIGINT)
    return f"Asked process {pid} to stop: each policy finishes its step and saves a checkpoint"
