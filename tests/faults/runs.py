"""Training run in the background, and its processes."""

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
    """Return all processes that carry the run directory in their arguments."""
    results = []
    for process in psutil.process_iter(["cmdline"]):
        if f"--run-dir={run}" in (process.info["cmdline"] or []):
            results.append(process)
    return results


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def steps_of(run: Path, policy: str) -> int:
    path = run / "policies" / policy / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


class FinishedRun:
    """What a run in `directory` left."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "r"
        self.errors = directory / "stderr.txt"

    def weights(self) -> dict[str, str]:
        """Return sha256 of every policy's trained weights."""
        return {
            path.parent.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.path / "policies").glob("*/model/model.safetensors"))
        }

    def metrics(self, policy: str) -> list[dict[str, Any]]:
        path = self.path / "policies" / policy / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


class Run(FinishedRun):
    """`mutualrl train` in the background; `begin` may be called again, as a user would."""

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
        wait_until(lambda: min(steps_of(self.path, "ada"), steps_of(self.path, "bob")) >= 2)

    def worker(self, policy: str) -> psutil.Process:
        (results,) = [
            p
            for p in members(self.path)
            if f"--policy={policy}" in p.cmdline() and "mutualrl.training.worker" in p.cmdline()
        ]
        return results

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for process in members(self.path):
            process.kill()


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """Mount a small file system for as long as the block lasts; skip the test where that may not be done."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs may not be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def hooked() -> str:
    """Return PYTHONPATH with the hooks in front."""
    return os.pathsep.join(filter(None, (str(HOOKS), os.environ.get("PYTHONPATH"))))


def stop_at(*points: str, mark: Path) -> dict[str, str]:
    """Return the environment under which a process stops at each of the points, `point:policy:n`, one after the other,
    and writes its process id into `mark.0`, `mark.1` and so on."""
    return {"PYTHONPATH": hooked(), "FAULT_POINTS": ",".join(points), "FAULT_MARK": str(mark)}


def stopped(mark: Path, run: Run, number: int = 0) -> psutil.Process:
    """Return the process that came to the point of this number."""
    mark = mark.with_name(f"{mark.name}.{number}")
    wait_until(lambda: (mark.exists() and bool(mark.read_text())) or run.process.poll() is not None)
    assert mark.exists(), f"the run ended before the point was reached: {run.errors.read_text()[-2000:]}"
    return psutil.Process(int(mark.read_text()))


def verified(run: Path) -> dict[str, Any]:
    """Return `runs verify`, which must find everything intact."""
    answer = subprocess.run(
        [sys.executable, "-m", "mutualrl", "runs", "verify", str(run), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


#: rounds of two optimizer steps, so that the checkpoint of step 3 falls inside a generation batch
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


def rolled_back(run: Path, to: Path, steps: dict[str, int]) -> Path:
    """Return a copy of a finished run as it was when each policy's newest checkpoint was that of the given step (0:
    none)."""
    shutil.copytree(run, to)
    (to / "summary.json").unlink()
    for policy, step in steps.items():
        files = to / "policies" / policy
        (files / "result.json").unlink()
        shutil.rmtree(files / "model")
        for checkpoint in (files / "checkpoints").glob("step-*"):
            if int(checkpoint.name.removeprefix("step-")) > step:
                shutil.rmtree(checkpoint)
    return to
