"""SIGKILL from outside at every named point of a run; the finished run must equal an undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import PATIENCE
from runs import SHORT, FinishedRun, Run, members, stop_at, stopped, verify_intact, wait_until

#: kills of one run, in order: the point (of a process of bob), the victim (the worker at the point, its agent or the
#: supervisor), and how often the process passes the point before
Kills = tuple[tuple[str, str, int], ...]
CHAINS: dict[str, Kills] = {
    "exchange": (
        ("before-shard", "worker", 2),
        ("mid-shard", "worker", 0),
        ("mid-shard", "supervisor", 0),
        ("between-shard-and-marker", "worker", 0),
        ("between-shard-and-marker", "supervisor", 0),
        ("after-marker", "worker", 0),
        ("in-the-wait", "worker", 0),
        ("in-the-wait", "supervisor", 0),
        ("in-the-wait", "agent", 0),
        ("checkpoint-marked", "agent", 0),
        ("checkpoint-latest", "worker", 0),
    ),
    "checkpoint": (
        ("checkpoint-begin", "worker", 0),
        ("checkpoint-marked", "supervisor", 0),
        ("checkpoint-files", "worker", 0),
        ("checkpoint-summed", "worker", 0),
        ("checkpoint-renamed", "worker", 0),
        ("in-validation", "worker", 0),
        ("before-the-result", "supervisor", 0),
    ),
    "training": (
        ("in-generation", "worker", 1),
        ("in-the-loss", "worker", 3),
        ("checkpoint-written", "worker", 0),
        ("checkpoint-half-pruned", "supervisor", 0),
        ("model-staged", "worker", 0),
        ("model-committed", "worker", 0),
        ("before-the-result", "worker", 0),
    ),
    "last checkpoint": (
        ("checkpoint-marked", "worker", 1),
        ("checkpoint-half-pruned", "worker", 0),
    ),
}
SINGLE: Kills = (("mid-shard", "worker", 2),)
MARKS = {
    "exchange": pytest.mark.release,
    "last checkpoint": pytest.mark.release,
    "checkpoint": pytest.mark.release,
    "training": pytest.mark.release,
}


def assert_equals_undisturbed(run: Run, unbroken: FinishedRun) -> None:
    assert not members(run.path)
    assert verify_intact(run.path)["damaged"] == []
    assert run.weights() == unbroken.weights()
    assert len(run.weights()) == 2
    for policy in ("ada", "bob"):
        rows = run.metrics(policy)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["see/round"] for row in rows if "see/round" in row] == [0, 1, 2]  # each round used once
        expected = unbroken.metrics(policy)
        for log in ("rescues.jsonl", "samples.jsonl"):
            logs = [each.path / "policies" / policy / log for each in (run, unbroken)]
            assert logs[0].read_bytes() == logs[1].read_bytes() != b""  # each pair and each sample once
        for key in ("loss", "reward", "sgt/pairs", "see/bytes", "num_tokens", "ppo_kl"):
            assert [row.get(key) for row in rows] == [row.get(key) for row in expected]


def kill(run: Run, victim: str, worker: psutil.Process, environment: dict[str, str]) -> None:
    """Kill the stopped worker, its agent, or the supervisor; after the supervisor, resume the run."""
    if victim == "supervisor":
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", **environment)
    else:
        (worker if victim == "worker" else worker.parent()).kill()


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(SINGLE, id="single", marks=pytest.mark.slow),
        *(pytest.param(chain, id=name, marks=MARKS[name]) for name, chain in CHAINS.items()),
    ],
)
def test_killed_runs_equal_an_undisturbed_run(
    unbroken: FinishedRun, tmp_path: Path, kills: Kills, record_property: Callable[[str, object], None]
) -> None:
    record_property("kills", json.dumps(kills))  # read by benchmarks/kill_matrix.py
    environment = stop_at(*(f"{point}:bob:{nth}" for point, _, nth in kills), mark=tmp_path / "mark")
    run = Run(tmp_path, *SHORT, "--set", "run.max_restarts=9", **environment)
    try:
        for number, (_, victim, _) in enumerate(kills):
            kill(run, victim, stopped(tmp_path / "mark", run, number), environment)
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert_equals_undisturbed(run, unbroken)
    finally:
        run.end()
