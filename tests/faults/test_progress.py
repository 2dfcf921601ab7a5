"""What lives and hangs, and what is silent because its disk is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import PATIENCE
from runs import SHORT, FinishedRun, Run, members, mounted, verified, wait_until

HANGS = """
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
def test_a_judge_that_hangs_is_named_and_its_policy_restarted(tmp_path: Path) -> None:
    """It beats all the while: liveness is not progress."""
    (tmp_path / "judge.py").write_text(HANGS)
    run = Run(
        tmp_path,
        *SHORT,
        *("--set", f"task.reward={tmp_path / 'judge.py'}:judge", "--set", "run.step_timeout=6"),
        *("--set", "run.peer_timeout=60", "--set", "run.max_restarts=1"),
    )
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        message = run.errors.read_text()
        assert (tmp_path / "hung").exists()
        assert "policy 'bob': no progress for" in message
        assert "policy 'bob' is alive but hangs: no progress for" in message
        assert "in scoring: reward function judge (run.step_timeout: 6 s)" in message
        assert "Restarting in" in message
        verified(run.path)
    finally:
        run.end()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 60 MB and 2,000 inodes."""
    with mounted(tmp_path / "disk", "size=60m,nr_inodes=2000") as place:
        yield place


def fill_bytes(disk: Path) -> None:
    with (disk / "others").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**12))
        except OSError:
            return


def fill_inodes(disk: Path) -> None:
    (disk / "others").mkdir()
    for number in range(10_000):
        try:
            (disk / "others" / str(number)).touch()
        except OSError:
            return


@pytest.mark.extended
@pytest.mark.parametrize("fill", [fill_bytes, fill_inodes])
def test_heartbeats_that_a_full_disk_takes_end_the_run_with_the_disks_name(
    unbroken: FinishedRun, disk: Path, fill: object
) -> None:
    steps = ("--steps", "60", *SHORT[2:], "--set", "run.save_every=0", "--set", "run.peer_timeout=4")
    run = Run(disk, *steps)
    try:
        run.until_training()
        fill(disk)  # type: ignore[operator]
        assert run.process.wait(PATIENCE) == 4, run.errors.read_text()
        message = run.errors.read_text()
        assert "bytes" in message
        assert "Restarting in" not in message
        wait_until(lambda: not members(run.path))
        subprocess.run(["rm", "-rf", str(disk / "others")], check=True)
        verified(run.path)
    finally:
        run.end()
