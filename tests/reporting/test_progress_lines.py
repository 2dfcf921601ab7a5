"""Progress without a terminal: a line on each change, and one every few minutes without a change."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from fake_clock import Clock
from mutualrl.reporting.progress import Progress
from mutualrl.storage.rundir import RunDirectory


def test_unchanged_line_is_not_repeated_for_two_minutes(tmp_path: Path, clock: Clock) -> None:
    screen = io.StringIO()
    run = RunDirectory(tmp_path)
    metrics = run.policy("ada").metrics
    metrics.parent.mkdir(parents=True)
    with Progress(run, ["ada"], 10, Console(file=screen, width=200)) as progress:

        def lines_after(seconds: float) -> int:
            before = len(screen.getvalue().splitlines())
            for _ in range(int(seconds)):
                clock.sleep(1)
                progress.update()
            return len(screen.getvalue().splitlines()) - before

        assert lines_after(16) == 1
        assert lines_after(90) == 0
        metrics.write_text(json.dumps({"step": 1}) + "\n")
        assert lines_after(16) == 1
        assert lines_after(100) == 0
        assert lines_after(60) == 1


def test_remaining_time_is_shown_from_the_first_step_until_the_last(tmp_path: Path, clock: Clock) -> None:
    screen = io.StringIO()
    run = RunDirectory(tmp_path)
    rows = [json.dumps({"step": step, "step_time": 60.0}) + "\n" for step in range(1, 11)]
    for policy in ("ada", "bob"):
        run.policy(policy).metrics.parent.mkdir(parents=True)
    with Progress(run, ["ada", "bob"], 10, Console(file=screen, width=200)) as progress:

        def line_with(ada: int, bob: int) -> str:
            for policy, steps in (("ada", ada), ("bob", bob)):
                run.policy(policy).metrics.write_text("".join(rows[:steps]))
            clock.sleep(16)
            progress.update()
            return screen.getvalue().splitlines()[-1]

        assert "left" not in line_with(1, 0)
        assert line_with(4, 2).endswith("; about 8 min of training left")  # of the slower policy
        assert "left" not in line_with(10, 10)
