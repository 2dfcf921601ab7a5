"""`mutualrl watch`: the screen, its keys, and a real terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from textual.containers import VerticalScroll
from textual.widgets import Static, TabbedContent

from conftest import PATIENCE, Cli
from made_runs import made_run
from mutualrl.cli.watch import stop_run
from mutualrl.cli.watch_screen import Confirm, WatchScreen, whole_ticks
from mutualrl.console.display import duration
from mutualrl.errors import UsageError
from mutualrl.regimes import get_regime
from mutualrl.runs.live import LiveRun
from mutualrl.storage.rundir import RunDirectory, hold
from runs import SHORT, Run, members, wait_until


class Watched:
    """A watch screen of an artificial run, and the calls that its keys made."""

    def __init__(self, root: Path, **answers: Any) -> None:
        self.run = RunDirectory(root)
        self.calls: list[str] = []
        self.is_live = True
        self.answers = answers
        self.screen = WatchScreen(
            LiveRun(self.run, answers.get("names", ["ada", "bob"]), get_regime("sgt").metrics),
            title="r · sgt · tiny · seed 0",
            measure="mean reward, greedy",
            steps=40,
            seconds=0.05,
            look=self._look,
            stop=None if answers.get("stop", "") is None else lambda: self._called("stop"),
            report=lambda: Path(self._called("report")),
        )

    def _look(self) -> bool:
        if isinstance(error := self.answers.get("look"), Exception):
            raise error
        return self.is_live

    def _called(self, action: str) -> str:
        self.calls.append(action)
        if isinstance(error := self.answers.get(action), Exception):
            raise error
        return str(self.answers.get(action, action))

    def text(self, selector: str) -> str:
        return str(self.screen.screen_stack[0].query_one(selector, Static).content)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.02)

    @property
    def messages(self) -> list[str]:
        return [notification.message for notification in self.screen._notifications]


def on_screen(watched: Watched, work: Callable[[Any], Coroutine[Any, Any, None]], size: tuple[int, int]) -> None:
    async def main() -> None:
        async with watched.screen.run_test(size=size) as pilot:
            await watched.until(lambda: "step 20/40" in watched.text("#head"))
            await work(pilot)

    asyncio.run(main())


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_screen_shows_the_progress_of_policies(tmp_path: Path, size: tuple[int, int]) -> None:
    watched = Watched(made_run(tmp_path / "r", "sgt", finished=False))
    rescue = {"step": 7, "prompt": "2+3:", "own": [{"text": " 6", "reward": 0.0}], "peer": "bob", "answer": " 5"}
    hinted = {**rescue, "step": 8, "hint": " 3+2=5", "answer": " 2+3=5"}
    watched.run.policy("ada").rescues.write_text(json.dumps(rescue) + "\n" + json.dumps(hinted) + "\n")

    async def look(pilot: Any) -> None:
        table = watched.screen.query_one("#policies", Static).content
        columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
        assert columns["policy"] == ["ada", "bob"]
        assert [columns[name][0] for name in ("step", "reward", "accuracy")] == ["20/40", "0.50", "0.45"]
        assert watched.screen.query_one("#gate").display == (size[0] >= 120)
        text = watched.text("#rescue-texts")
        assert "step 7  2+3:\n  ✗ ada: 6\n  ✓ bob: 5\n" in text
        assert "step 8  2+3:\n  ✗ ada: 6\n  ? bob (hint): 3+2=5\n  ✓ ada: 2+3=5\n" in text
        assert "running" in watched.text("#head")
        for selector in ("#curves", "#table", "#details"):  # fully on the screen
            region = watched.screen.query_one(selector).region
            assert region.height > 0
            assert region.bottom <= size[1]
        watched.is_live = False
        await watched.until(lambda: "ended" in watched.text("#head"))

    on_screen(watched, look, size)


def test_model_text_is_shown_without_control_characters(tmp_path: Path) -> None:
    watched = Watched(made_run(tmp_path / "r", "sgt", finished=False))
    hostile = "\x1b]0;owned\x07[bold]not bold[/bold]\u202e\x1b[2J"
    rescue = {"step": 20, "prompt": hostile, "own": [{"text": hostile}], "peer": hostile, "answer": hostile}
    odd = [{"step": None, "own": "none"}, {"step": "x" * 999, "own": [7], "answer": ["a"]}]
    watched.run.policy("ada").rescues.write_text("".join(json.dumps(row) + "\n" for row in (rescue, *odd)))
    logs = watched.run.policy("ada").logs
    logs.mkdir(exist_ok=True)
    (logs / "attempt-0.log").write_text(hostile + "\n")

    async def look(pilot: Any) -> None:
        for selector in ("#rescue-texts", "#log-text-0"):
            await watched.until(lambda selector=selector: "[bold]not bold[/bold]" in watched.text(selector))
            assert not re.search(r"[\x1b\x07\u202e]", watched.text(selector))

    on_screen(watched, look, (100, 30))


def test_stop_key_asks_for_confirmation_and_keys_report_their_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    watched = Watched(made_run(tmp_path / "r", "sgt", finished=False), stop="asked [all] to stop", report="page.html")

    async def press(pilot: Any) -> None:
        await pilot.press("s")
        await watched.until(lambda: isinstance(watched.screen.screen, Confirm))
        await pilot.press("n")
        await watched.until(lambda: not isinstance(watched.screen.screen, Confirm))
        assert watched.calls == []
        await pilot.press("s", "y")
        await watched.until(lambda: "asked [all] to stop" in watched.messages)
        await pilot.press("o")
        await watched.until(lambda: "Written: page.html" in watched.messages)
        assert watched.calls == ["stop", "report"]
        await pilot.press("q")
        await watched.until(lambda: not watched.screen.is_running)

    on_screen(watched, press, (80, 24))


def test_log_view_follows_its_end_and_failed_keys_are_reported(tmp_path: Path) -> None:
    watched = Watched(made_run(tmp_path / "r", "sgt", finished=False), stop=None, report=OSError("no space"))
    logs = watched.run.policy("ada").logs
    logs.mkdir(exist_ok=True)
    log = logs / "attempt-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))

    async def look(pilot: Any) -> None:
        await watched.until(lambda: "line 99" in watched.text("#log-text-0"))
        watched.screen.query_one(TabbedContent).active = "log-0"
        scroll = watched.screen.query_one("#scroll-0", VerticalScroll)
        await watched.until(lambda: 0 < scroll.max_scroll_y == scroll.scroll_offset.y)
        with log.open("a") as file:
            file.writelines(f"more {number}\n" for number in range(50))
        before = scroll.max_scroll_y
        await watched.until(lambda: before < scroll.max_scroll_y == scroll.scroll_offset.y)
        await pilot.press("s")  # as for a run in a bucket
        await watched.until(lambda: any("where it runs" in message for message in watched.messages))
        assert not isinstance(watched.screen.screen, Confirm)
        await pilot.press("o")
        await watched.until(lambda: "no space" in watched.messages)

    on_screen(watched, look, (80, 24))


def test_many_policies_are_distinguished_and_scroll(tmp_path: Path) -> None:
    names = [f"policy-{number}" for number in range(14)]
    root = made_run(tmp_path / "r", "sgt", finished=False, policies=names)
    watched = Watched(root, names=names)

    async def look(pilot: Any) -> None:
        table = watched.screen.query_one("#policies", Static)
        assert watched.screen.query_one("#table", VerticalScroll).max_scroll_y > 0
        colours = [str(cell.spans[0].style) for cell in table.content.columns[0].cells]
        assert len(set(colours)) == 10
        assert watched.screen.query_one("#head").region.y == 0
        head = watched.text("#head")
        assert head.startswith("step 20/40 · running · about")

    on_screen(watched, look, (60, 24))


def test_unavailable_store_and_failed_key_are_reported(tmp_path: Path) -> None:
    error = OSError("the bucket is away")
    root = made_run(tmp_path / "r", "sgt", finished=False)
    watched = Watched(root, stop=UsageError("not from here"))

    async def look(pilot: Any) -> None:
        watched.answers["look"] = error
        await watched.until(lambda: "the bucket is away" in watched.text("#head"))
        del watched.answers["look"]
        await watched.until(lambda: "running" in watched.text("#head"))
        await pilot.press("s", "y")
        await watched.until(lambda: "not from here" in watched.messages)

    on_screen(watched, look, (80, 24))


class Terminal:
    """A command in its own pseudo-terminal."""

    def __init__(self, *command: str, columns: int = 100, rows: int = 30) -> None:
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "CI", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.seen = ""

    def until(self, *texts: str) -> None:
        """Wait for one of these texts."""
        wait_until(lambda: self._has_ended() or any(text in self.seen for text in texts))
        assert any(text in self.seen for text in texts), self.seen[-2000:]

    def _has_ended(self) -> bool:
        """Read the available output and return whether no more will come."""
        ended = self.process.poll() is not None
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:  # the other end is closed
                break
        return ended

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def end(self) -> int:
        """Read the remaining output and return the exit code."""
        wait_until(self._has_ended)
        return int(self.process.returncode)


def test_watch_is_a_screen_in_a_terminal_and_lines_with_plain(tmp_path: Path, cli: Cli) -> None:
    root = made_run(tmp_path / "r", "sgt", finished=False)
    with ExitStack() as stack:
        stack.enter_context(hold(RunDirectory(root).lock, "r"))
        terminal = Terminal(sys.executable, "-m", "mutualrl", "watch", str(root))
        terminal.until("Stop and save")
        terminal.until("20/20")
        terminal.press("q")
        assert terminal.end() == 0
        assert "still running" in terminal.seen
        plain = Terminal(sys.executable, "-m", "mutualrl", "watch", "--plain", str(root))
        plain.until("gate rate")
        assert "Stop and save" not in plain.seen
        plain.process.terminate()
        plain.end()


def test_stop_may_be_requested_twice(tmp_path: Path) -> None:
    """The request is a file that the supervisor checks for; no process named in a run directory is signalled."""
    run = RunDirectory(made_run(tmp_path / "r", "sgt", finished=False))
    with pytest.raises(UsageError, match="has already ended"):
        stop_run(run)
    assert not run.stop_file.exists()
    run.stop_file.parent.mkdir()
    with hold(run.lock, "r"):
        for _ in range(2):
            assert "Stop request sent to process" in stop_run(run)
        assert run.stop_file.exists()


@pytest.mark.extended
@pytest.mark.slow
def test_run_is_stopped_from_the_screen_and_can_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, *SHORT, "--steps", "100000")
    try:
        run.until_training()
        terminal = Terminal(sys.executable, "-m", "mutualrl", "watch", str(run.path))
        terminal.until("Stop and save")
        for _ in range(2):  # a user who sees no effect asks again
            terminal.press("s")
            terminal.until("prints how to resume")
            terminal.press("y")
            terminal.until("Stop request sent to process", "has already ended")
            terminal.seen = ""
        assert run.process.wait(PATIENCE) == 130, run.errors.read_text()
        assert "stopped at the request of another process; checkpoints: ada at step" in run.errors.read_text()
        assert not members(run.path)
        terminal.until("ended")
        terminal.press("q")
        assert terminal.end() == 1  # not finished
        assert "--resume" in terminal.seen
    finally:
        run.end()


def test_durations_and_ticks_are_whole() -> None:
    assert [duration(seconds) for seconds in (5, 89, 90, 3600, 7200)] == ["5 s", "89 s", "2 min", "60 min", "2.0 h"]
    assert whole_ticks(1, 100) == [1, 34, 67, 100]
    assert whole_ticks(1, 2) == [1, 2]
    assert whole_ticks(3, 3) == [3]
