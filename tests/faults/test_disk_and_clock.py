"""Disks that fill up or fail, and clocks that jump."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import PATIENCE
from mutualrl.storage.checkpoints import Checkpoints
from runs import SHORT, FinishedRun, Run, hooked, members, mounted, verified

pytestmark = pytest.mark.extended

#: what the disk refuses one session of a run after the other: bob's file, the how manieth write to it, the error, and
#: what the message holds
REFUSALS = (
    ("/exchange/bob/.000001", 0, "ENOSPC", "000001.parquet: "),
    ("/exchange/bob/.000002.json", 0, "EIO", "000002.json: "),
    ("/trainer/checkpoint-6", 0, "EROFS", "step-000006: cannot be written"),
)


def test_a_disk_that_refuses_ends_the_run_with_path_and_bytes_and_takes_nothing(
    unbroken: FinishedRun, tmp_path: Path
) -> None:
    run = None
    try:
        for part, nth, code, words in REFUSALS:
            fault = {"PYTHONPATH": hooked(), "FAULT_DISK": f"bob:{part}:{nth}:{code}"}
            if run is None:
                run = Run(tmp_path, *SHORT, **fault)
            else:
                run.begin("--resume", **fault)
            assert run.process.wait(PATIENCE) == 4, run.errors.read_text()
            message = run.errors.read_text().rpartition("Run directory: ")[2]  # of this session
            assert words in message
            assert "bytes" in message
            assert "Restarting in" not in message  # another start would meet the same disk
            assert not members(run.path)
            verified(run.path)
        assert run is not None
        run.begin("--resume")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
    finally:
        if run is not None:
            run.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 9 MB."""
    with mounted(tmp_path / "disk", "size=9m") as place:
        yield place


def test_a_full_disk_is_seen_before_a_checkpoint_is_begun(unbroken: FinishedRun, small_disk: Path) -> None:
    run = Run(small_disk, *SHORT, "--set", "run.save_every=1", "--set", "run.keep_checkpoints=9")
    try:
        assert run.process.wait(PATIENCE) == 4, run.errors.read_text()
        message = run.errors.read_text()
        assert "bytes" in message
        assert "free" in message or "cannot be written" in message
        selected = {p: Checkpoints(run.path / "policies" / p).steps() for p in ("ada", "bob")}
        assert all(selected.values())
        for policy, steps in selected.items():
            for step in steps:
                Checkpoints(run.path / "policies" / policy).verify(step)
        subprocess.run(["mount", "-o", "remount,size=99m", str(small_disk)], check=True)
        run.begin("--resume")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
    finally:
        run.end()


def test_a_wall_clock_that_jumps_by_days_changes_nothing(unbroken: FinishedRun, tmp_path: Path) -> None:
    run = Run(tmp_path, *SHORT, "--set", "run.peer_timeout=10.0", PYTHONPATH=hooked(), FAULT_CLOCK="1")
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
    finally:
        run.end()
