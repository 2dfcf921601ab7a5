"""`mutualrl watch`: follow a live run from another terminal or another machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mutualrl.cli.commands import Watch
from mutualrl.cli.output import emit, screen
from mutualrl.cli.results import run_row, show_summary
from mutualrl.cli.watch_screen import WatchScreen
from mutualrl.console.display import clean, print_text
from mutualrl.errors import MutualRLError, UsageError
from mutualrl.launch.stop import write_stop_request
from mutualrl.process.status import RunState
from mutualrl.reporting.progress import Progress
from mutualrl.runs.live import LiveRun
from mutualrl.runs.overview import read_overview
from mutualrl.runs.read import read_run
from mutualrl.runs.record import Run
from mutualrl.runs.remote import RunPlace, run_place
from mutualrl.storage.rundir import RunDirectory, holder_of


def watch(options: Watch) -> None:
    """Follow a run on a screen or in lines, and print its results at the end."""
    run = options.run
    with run_place(run) as place:
        if options.as_json:
            emit({**run_row(read_overview(place.root)), "run": place.shown})
            return
        current = read_run(place.root)
        if current.state in (RunState.RUNNING, RunState.ELSEWHERE):
            terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
            follow = _follow_on_screen if terminal and not options.plain else _follow_lines
            follow(place, current)
            current = read_run(place.root)
        if current.state in (RunState.RUNNING, RunState.ELSEWHERE):  # the user left the screen
            print_text(screen(), f"{run} is still running")
        elif current.info.scripts and current.state == RunState.FINISHED:
            print_text(screen(), f"{run} has finished; its scripts measure no accuracy. See: mutualrl report {run}")
        elif current.summary is None or current.state != RunState.FINISHED:
            raise MutualRLError(f"the run {clean(run)} is {current.state}: {'; '.join(current.notes)}")
        else:
            show_summary(current.summary, place.shown)


def _follow_lines(place: RunPlace, current: Run) -> None:
    metrics = current.rule.metrics
    directory = RunDirectory(current.root)
    with Progress(directory, list(current.policies), current.planned_steps or 0, screen(), metrics) as progress:
        while place.look():
            progress.update()
            time.sleep(place.seconds)


def _follow_on_screen(place: RunPlace, current: Run) -> None:
    directory = RunDirectory(current.root)
    local = [name for name in current.policies if directory.policy(name).root.is_dir()]
    joined = current.info.exchange and local  # its directory has only its own policy
    names = local if joined else list(current.policies)
    live = LiveRun(directory, names, current.rule.metrics, recipe=not current.info.scripts)
    name = place.name or current.name
    title = clean(f"{name} · {current.arm} · {current.pool} · seed {current.seed}", 200)
    app = WatchScreen(
        live,
        title=title,
        measure="greedy accuracy" if current.measures_accuracy else "mean reward, greedy",
        steps=current.planned_steps or 0,
        seconds=max(1.0, place.seconds),
        look=place.look,
        stop=(lambda: stop_run(directory)) if place.is_here else None,
        report=lambda: _report(directory, place.page.absolute()),
    )
    app.run()
    if app.return_code:
        raise MutualRLError("the screen failed (see above); the run continues. Use instead: mutualrl watch --plain")


def _report(run: RunDirectory, out: Path) -> Path:
    """Write the report, and return its page. What draws it is imported when it is asked for."""
    from mutualrl.cli.report import page_of

    return page_of([run.root], out).page


def stop_run(run: RunDirectory) -> str:
    """Send a stop request to a run's supervisor, and return a message. Raises UsageError if the run has ended."""
    holder = holder_of(run.lock)
    if holder is None:
        raise UsageError("the run has already ended")
    write_stop_request(run)
    return f"Stop request sent to {clean(holder, 200)}: each policy finishes its step and saves a checkpoint"
