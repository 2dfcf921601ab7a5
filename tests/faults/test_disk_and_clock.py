"""Full and failing disks, and jumping clocks."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import PATIENCE
from mutualrl.storage.checkpoints import Checkpoints
from runs import SHORT, FinishedRun, Run, members, mounted_tmpfs, pythonpath_with_hooks, verify_intact

pytestmark = pytest.mark.extended

#: one disk error per session of a run: part of the path of bob's file, the fsync that fails, the error, and part of
#: the message
DISK_ERRORS = (
    ("/exchange/bob/.000001", 0, "ENOSPC", "000001.parquet: "),
    ("/exchange/bob/.000002.json", 0, "EIO", "000002.json: "),
    ("/trainer/checkpoint-6", 0, "EROFS", "step-000006: cannot be written"),
)


def test_disk_errors_end_the_run_with_path_and_bytes_and_damage_nothing(unbroken: FinishedRun, tmp_path: Path) -> None:
    run = None
    try:
        for part, nth, code, message in DISK_ERRORS:
            fault = {"PYTHONPATH": pythonpath_with_hooks(), "FAULT_DISK": f"bob:{part}:{nth}:{code}"}
            if run is None:
                run = Run(tmp_path, *SHORT, **fault)
            else:
                run.begin("--resume", **fault)
            assert run.process.wait(PATIENCE) == 4, run.errors.read_text()
            errors = run.errors.read_text().rpartition("Run directory: ")[2]  # of this session
            assert message in errors
            assert "bytes" in errors
            assert "Restarting in" not in errors  # a restart would fail on the same disk
            assert not members(run.path)
            verify_intact(run.path)
        assert run is not None
        run.begin("--resume")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
    finally:
        if run is not None:
            run.end()


def test_limit_on_the_size_of_a_file_is_named_with_what_to_raise_and_no_traceback(tmp_path: Path) -> None:
    limit = 200 * 1024  # a checkpoint's model has ten times that
    command = [sys.executable, "-m", "mutualrl", "train", "--regime", "grpo", "--model", "tiny:ada", "--steps", "1"]
    result = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 4
    assert "step-000001: cannot be written" in result.stderr
    assert "ulimit -f" in result.stderr
    for absent in ("Free some space", "Traceback", 'File "'):
        assert absent not in result.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a file system of 9 MB."""
    with mounted_tmpfs(tmp_path / "disk", "size=9m") as directory:
        yield directory


def test_full_disk_is_detected_before_a_checkpoint_starts(unbroken: FinishedRun, small_disk: Path) -> None:
    run = Run(small_disk, *SHORT, "--set", "run.save_every=1", "--set", "run.keep_checkpoints=9")
    try:
        assert run.process.wait(PATIENCE) == 4, run.errors.read_text()
        errors = run.errors.read_text()
        assert "bytes" in errors
        assert "free" in errors or "cannot be written" in errors
        steps_of = {p: Checkpoints(run.path / "policies" / p).steps() for p in ("ada", "bob")}
        assert all(steps_of.values())
        for policy, steps in steps_of.items():
            for step in steps:
                Checkpoints(run.path / "policies" / policy).verify(step)
        subprocess.run(["mount", "-o", "remount,size=99m", str(small_disk)], check=True)
        run.begin("--resume")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
    finally:
        run.end()


def test_wall_clock_jumps_change_nothing(unbroken: FinishedRun, tmp_path: Path) -> None:
    run = Run(tmp_path, *SHORT, "--set", "run.peer_timeout=10.0", PYTHONPATH=pythonpath_with_hooks(), FAULT_CLOCK="1")
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
    finally:
        run.end()
