"""SIGKILL from outside at every named point of a run; afterwards it must be as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Run, members, stop_at, stopped, wait_until

#: rounds of two optimizer steps, so that the checkpoint of step 3 falls inside a generation batch
SHORT = (
    "--steps", "6", "--set", "round.optimizer_steps=2", "--set", "round.prompts=16", "--set", "run.save_every=3",
    "--set", "trainer.per_device_train_batch_size=32",
    "--set", "run.validate_every=0", "--set", "run.validation_limit=4", "--set", "run.keep_checkpoints=1",
)  # fmt: skip
POINTS = {
    "before-shard": 2,
    "mid-shard": 2,
    "between-shard-and-marker": 2,
    "after-marker": 1,
    "in-the-wait": 2,
    "in-generation": 1,
    "after-generation": 2,
    "in-the-loss": 3,
    "checkpoint-begin": 0,
    "checkpoint-files": 0,
    "checkpoint-written": 1,
    "checkpoint-summed": 1,
    "checkpoint-marked": 1,
    "checkpoint-renamed": 1,
    "checkpoint-latest": 1,
    "checkpoint-before-prune": 1,
    "checkpoint-half-pruned": 0,
    "checkpoint-done": 1,
    "in-validation": 1,
    "before-the-result": 0,
}
IN_CI = {("mid-shard", "worker"), ("between-shard-and-marker", "supervisor"), ("checkpoint-marked", "agent")}
CASES = [(point, victim) for point in POINTS for victim in ("worker", "supervisor")]
CASES += [("checkpoint-marked", "agent"), ("in-the-wait", "agent")]


@pytest.fixture(scope="session")
def unbroken(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nobody disturbed."""
    run = Run(tmp_path_factory.mktemp("unbroken"), *SHORT)
    assert run.process.wait(120) == 0, run.errors.read_text()
    return run


def verify(run: Run) -> dict[str, object]:
    answer = subprocess.run(
        [sys.executable, "-m", "mutualrl", "exchange", "verify", str(run.path), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout
    found: dict[str, object] = json.loads(answer.stdout)
    return found


def as_if_nothing_had_happened(run: Run, unbroken: Run) -> None:
    assert not members(run.path)
    assert verify(run)["damaged"] == []
    assert run.weights() == unbroken.weights()
    assert len(run.weights()) == 2
    for policy in ("ada", "bob"):
        lines = run.metrics(policy)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert [line["see/round"] for line in lines if "see/round" in line] == [0, 1, 2]  # each record used once
        before = unbroken.metrics(policy)
        for key in ("loss", "reward", "sgt/pairs", "see/bytes", "num_tokens", "ppo_kl"):
            assert [line.get(key) for line in lines] == [line.get(key) for line in before]


@pytest.mark.parametrize(
    ("point", "victim"),
    [pytest.param(*case, marks=pytest.mark.slow if case in IN_CI else pytest.mark.faults) for case in CASES],
)
def test_a_kill_leaves_no_trace(unbroken: Run, tmp_path: Path, point: str, victim: str) -> None:
    mark = tmp_path / "mark"
    run = Run(tmp_path, *SHORT, **stop_at(point, mark, nth=POINTS[point]))
    try:
        process = stopped(mark, run)
        if victim == "supervisor":
            run.process.kill()
            run.process.wait()
            wait_until(lambda: not members(run.path), 5)
            run.begin("--resume", **stop_at(point, mark))
        else:
            (process if victim == "worker" else process.parent()).kill()
        assert run.process.wait(120) == 0, run.errors.read_text()
        as_if_nothing_had_happened(run, unbroken)
    finally:
        run.end()
