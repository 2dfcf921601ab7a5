"""Training runs in the background and their processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import PATIENCE

HOOKS = Path(__file__).parent / "hooks"


def members(run: Path) -> list[psutil.Process]:
    """Return all processes with the run directory in their arguments."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        if f"--run-dir={run}" in (process.info["cmdline"] or []):
            processes.append(process)
    return processes


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; fail after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


def logged_steps(run: Path, policy: str) -> int:
    """Return the number of steps in a policy's metrics so far."""
    path = run / "policies" / policy / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


class FinishedRun:
    """Outputs of a run in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "r"
        self.errors = directory / "stderr.txt"

    def weights(self) -> dict[str, str]:
        """Return the sha256 of every policy's trained weights."""
        return {
            path.parent.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.path / "policies").glob("*/model/model.safetensors"))
        }

    def metrics(self, policy: str) -> list[dict[str, Any]]:
        path = self.path / "policies" / policy / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


class Run(FinishedRun):
    """`mutualrl train` in the background; calling `begin` again runs a further command on the directory."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        of: Sequence[str] = ("--regime", "sgt", "--pool", "tiny"),
        **environment: str,
    ) -> None:
        super().__init__(directory)
        self.begin(*of, *arguments, **environment)

    def begin(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mutualrl", "train", "--run-dir", str(self.path), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=self.errors.open("ab"),
            env={**os.environ, "COLUMNS": "200", **environment},
        )

    def until_training(self) -> None:
        wait_until(lambda: min(logged_steps(self.path, "ada"), logged_steps(self.path, "bob")) >= 2)

    def worker(self, policy: str) -> psutil.Process:
        (worker,) = [
            process
            for process in members(self.path)
            if f"--policy={policy}" in process.cmdline() and "mutualrl.training.worker" in process.cmdline()
        ]
        return worker

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in members(self.path):
            process.kill()


@contextmanager
def mounted_tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs during the block; skip the test if mounting is not permitted."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("not permitted to mount a tmpfs")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def pythonpath_with_hooks() -> str:
    """Return PYTHONPATH with the hooks first."""
    return os.pathsep.join(filter(None, (str(HOOKS), os.environ.get("PYTHONPATH"))))


def stop_at(*points: str, mark: Path) -> dict[str, str]:
    """Return the environment in which a process stops at each of the points (`point:policy:n`) in turn and writes its
    process id to `mark.0`, `mark.1`, and so on."""
    return {"PYTHONPATH": pythonpath_with_hooks(), "FAULT_POINTS": ",".join(points), "FAULT_MARK": str(mark)}


def stopped(mark: Path, run: Run, number: int = 0) -> psutil.Process:
    """Wait for a process to stop at the point with this number, and return it."""
    mark = mark.with_name(f"{mark.name}.{number}")
    wait_until(lambda: (mark.exists() and bool(mark.read_text())) or run.process.poll() is not None)
    assert mark.exists(), f"the run ended before the point was reached: {run.errors.read_text()[-2000:]}"
    return psutil.Process(int(mark.read_text()))


def verify_intact(run: Path) -> dict[str, Any]:
    """Return the report of `runs verify`, which must find everything intact."""
    result = subprocess.run(
        [sys.executable, "-m", "mutualrl", "runs", "verify", str(run), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    report: dict[str, Any] = json.loads(result.stdout)
    return report


#: rounds of two optimizer steps, so that the checkpoint of step 3 is inside a generation batch
SHORT = (
    "--steps",
    "6",
    "--set",
    "round.optimizer_steps=2",
    "--set",
    "round.prompts=16",
    "--set",
    "run.save_every=3",
    "--set",
    "trainer.per_device_train_batch_size=32",
    "--set",
    "run.validate_every=0",
    "--set",
    "run.validation_limit=4",
    "--set",
    "run.keep_checkpoints=1",
)


def rolled_back(run: Path, copy: Path, steps: dict[str, int]) -> Path:
    """Copy a finished run back to the state in which each policy's newest checkpoint was that of its step (0: none)."""
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    for policy, step in steps.items():
        files = copy / "policies" / policy
        (files / "result.json").unlink()
        shutil.rmtree(files / "model")
        for checkpoint in (files / "checkpoints").glob("step-*"):
            if int(checkpoint.name.removeprefix("step-")) > step:
                shutil.rmtree(checkpoint)
    return copy
