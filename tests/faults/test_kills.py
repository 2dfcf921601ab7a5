"""SIGKILL from outside at every named point of a run; afterwards it must be as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import PATIENCE
from runs import SHORT, FinishedRun, Run, members, stop_at, stopped, verified, wait_until

#: kills of one run, in this order: at a point that a process of bob comes to, of the worker there, the agent above it
#: or the supervisor, after so many times that the process passed the point
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


def as_if_nothing_had_happened(run: Run, unbroken: FinishedRun) -> None:
    assert not members(run.path)
    assert verified(run.path)["damaged"] == []
    assert run.weights() == unbroken.weights()
    assert len(run.weights()) == 2
    for policy in ("ada", "bob"):
        lines = run.metrics(policy)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert [line["see/round"] for line in lines if "see/round" in line] == [0, 1, 2]  # each record used once
        before = unbroken.metrics(policy)
        learnt = [each.path / "policies" / policy / "rescues.jsonl" for each in (run, unbroken)]
        assert learnt[0].read_bytes() == learnt[1].read_bytes()  # every pair once
        for key in ("loss", "reward", "sgt/pairs", "see/bytes", "num_tokens", "ppo_kl"):
            assert [line.get(key) for line in lines] == [line.get(key) for line in before]


def kill(run: Run, point: str, victim: str, process: psutil.Process, environment: dict[str, str]) -> None:
    """Kill the worker that stands at a point, or who is above it; resume where nobody is left to restart it."""
    if victim == "supervisor":
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", **environment)
    else:
        (process if victim == "worker" else process.parent()).kill()


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(SINGLE, id="single", marks=pytest.mark.slow),
        *(pytest.param(chain, id=name, marks=pytest.mark.extended) for name, chain in CHAINS.items()),
    ],
)
def test_kills_leave_no_trace(
    unbroken: FinishedRun, tmp_path: Path, kills: Kills, record_property: Callable[[str, object], None]
) -> None:
    record_property("kills", json.dumps(kills))  # read by benchmarks/kill_matrix.py
    environment = stop_at(*(f"{point}:bob:{nth}" for point, _, nth in kills), mark=tmp_path / "mark")
    run = Run(tmp_path, *SHORT, "--set", "run.max_restarts=9", **environment)
    try:
        for number, (point, victim, _) in enumerate(kills):
            kill(run, point, victim, stopped(tmp_path / "mark", run, number), environment)
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        as_if_nothing_had_happened(run, unbroken)
    finally:
        run.end()
