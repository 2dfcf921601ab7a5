"""Runs with tools: a tool that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PATIENCE
from runs import Run, verify_intact

AGENTS = ("--regime", "hinted", "--pool", "tiny-tools", "--set", "regime.samples=2")
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
