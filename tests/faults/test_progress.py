"""Policies that are alive but hang, and policies without heartbeats because the disk is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import PATIENCE
from runs import SHORT, FinishedRun, Run, members, mounted_tmpfs, verify_intact, wait_until

HANGING_JUDGE = """
import pathlib, time

HERE = pathlib.Path(__file__).parent
calls = 0

def judge(completions, answer, trainer_state, **kwargs):
    global calls
    calls += 1
    if calls == 3 and not (HERE / "hung").exists() and "bob" in trainer_state_dir():
        (HERE / "hung").touch()
        while True:
            time.sleep(1)
    return [float(len(str(c)) % 3 == 0) for c in completions]

def trainer_state_dir():
    import sys
    return " ".join(sys.argv)
"""


@pytest.mark.extended
def test_hanging_reward_function_is_reported_and_its_policy_restarted(tmp_path: Path) -> None:
    """Heartbeats continue during the hang; they are no evidence of progress."""
    (tmp_path / "judge.py").write_text(HANGING_JUDGE)
    run = Run(
        tmp_path,
        *SHORT,
        *("--set", f"task.reward={tmp_path / 'judge.py'}:judge", "--set", "run.step_timeout=6"),
        *("--set", "run.peer_timeout=60", "--set", "run.max_restarts=1"),
    )
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        errors = run.errors.read_text()
        assert (tmp_path / "hung").exists()
        assert "policy 'bob': no progress for" in errors
        assert "policy 'bob' is alive but hangs: no progress for" in errors
        assert "in scoring: reward function judge (run.step_timeout: 6 s)" in errors
        assert "Restarting in" in errors
        verify_intact(run.path)
    finally:
        run.end()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a file system of 60 MB and 2,000 inodes."""
    with mounted_tmpfs(tmp_path / "disk", "size=60m,nr_inodes=2000") as directory:
        yield directory


def fill_bytes(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**12))
        except OSError:
            return


def fill_inodes(disk: Path) -> None:
    (disk / "filler").mkdir()
    for number in range(10_000):
        try:
            (disk / "filler" / str(number)).touch()
        except OSError:
            return


@pytest.mark.extended
@pytest.mark.parametrize("fill", [fill_bytes, fill_inodes])
def test_run_ends_naming_the_disk_when_it_is_too_full_for_heartbeats(
    unbroken: FinishedRun, disk: Path, fill: object
) -> None:
    steps = ("--steps", "60", *SHORT[2:], "--set", "run.save_every=0", "--set", "run.peer_timeout=4")
    run = Run(disk, *steps)
    try:
        run.until_training()
        fill(disk)  # type: ignore[operator]
        assert run.process.wait(PATIENCE) == 4, run.errors.read_text()
        errors = run.errors.read_text()
        assert "bytes" in errors
        assert "Restarting in" not in errors
        wait_until(lambda: not members(run.path))
        subprocess.run(["rm", "-rf", str(disk / "filler")], check=True)
        verify_intact(run.path)
    finally:
        run.end()
