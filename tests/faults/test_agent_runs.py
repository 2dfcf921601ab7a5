"""Runs with tools: SIGKILL during a call, of a rollout and of a sample after a hint; a tool that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PATIENCE
from runs import SHORT, FinishedRun, Run, members, stop_at, stopped, verify_intact, wait_until

AGENTS = ("--regime", "hinted", "--pool", "tiny-tools", "--set", "regime.samples=2")
#: rounds of 64 rollouts, of which kim calls the tool for about half; the second kill is in the samples, which follow
POINTS = ("in-a-tool-call:kim:100", "in-a-tool-call:kim:45")
#: an environment whose reset depends on its row only, and which is the judge
ROOM = '''
from mutualrl.tasks.calculator import calculate as compute


class Room:
    def reset(self, answer: str = "", **row) -> None:
        self.answer, self.result = answer, None

    def calculate(self, operation: str, a: int, b: int) -> int:
        """Calculate.

        Args:
            operation: Either plus or times.
            a: First.
            b: Second.
        """
        self.result = compute(operation, a, b)
        return self.result

    def get_reward(self) -> float:
        return float(str(self.result) == self.answer)
'''
HANGING = '''
import time
from pathlib import Path


def calculate(operation: str, a: int, b: int) -> int:
    """Calculate.

    Args:
        operation: Either plus or times.
        a: First.
        b: Second.
    """
    mark = Path(__file__).with_name("hung")
    if a == 99 and not mark.exists():
        mark.touch()
        while True:
            time.sleep(1)
    return a + b if operation == "plus" else a * b
'''


def finished(run: Run) -> FinishedRun:
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()[-3000:]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["reward", pytest.param("environment", marks=pytest.mark.extended)])
def test_a_run_that_is_killed_during_a_tool_call_resumes_to_the_same_bytes(tmp_path: Path, judge: str) -> None:
    options = (*SHORT, "--set", "run.max_restarts=9")
    if judge == "environment":
        (tmp_path / "room.py").write_text(ROOM)
        room = f"task.environment={tmp_path / 'room.py'}:Room"
        options = (*options, "--set", room, "--set", "task.tools=[]", "--set", "task.reward=[]")
    (tmp_path / "a").mkdir()
    unbroken = finished(Run(tmp_path / "a", *options, of=AGENTS))
    environment = stop_at(*POINTS, mark=tmp_path / "mark")
    (tmp_path / "b").mkdir()
    run = Run(tmp_path / "b", *options, of=AGENTS, **environment)
    try:
        stopped(tmp_path / "mark", run, 0).kill()
        stopped(tmp_path / "mark", run, 1)
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", **environment)
        finished(run)
    finally:
        run.end()
    assert verify_intact(run.path)["damaged"] == []
    assert run.weights() == unbroken.weights()
    for policy in ("jan", "kim"):
        for log in ("rescues.jsonl", "samples.jsonl"):
            logs = [each.path / "policies" / policy / log for each in (run, unbroken)]
            assert logs[0].read_bytes() == logs[1].read_bytes() != b""
        for key in ("loss", "reward", "hinted/confirmed", "tools/turns", "tools/over_calls", "num_tokens"):
            assert [row.get(key) for row in run.metrics(policy)] == [row.get(key) for row in unbroken.metrics(policy)]


@pytest.mark.extended
def test_a_hanging_tool_is_named_and_its_policy_restarted(tmp_path: Path) -> None:
    """It cannot be ended in the trainer's process; the peer waits."""
    (tmp_path / "board.py").write_text(HANGING)
    run = Run(
        tmp_path,
        *("--steps", "6", "--set", f"task.tools={tmp_path / 'board.py'}:calculate", "--set", "run.step_timeout=6"),
        *("--set", "run.peer_timeout=60", "--set", "run.max_restarts=1", "--set", "run.validation_limit=4"),
        of=AGENTS,
    )
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        errors = run.errors.read_text()
        assert (tmp_path / "hung").exists()
        assert "is alive but hangs: no progress for" in errors
        assert "in calling tool calculate (run.step_timeout: 6 s)" in errors
        assert "Restarting in" in errors
        verify_intact(run.path)
    finally:
        run.end()
