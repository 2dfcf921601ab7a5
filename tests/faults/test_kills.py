"""SIGKILL from outside at every named point of a run; afterwards it must be as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PATIENCE
from runs import SHORT, Run, members, stop_at, stopped, verified, wait_until

POINTS = {
    "before-shard": 2,
    "mid-shard": 2,
    "between-shard-and-marker": 2,
    "after-marker": 1,
    "in-the-wait": 2,
    "in-generation": 1,
    "in-the-loss": 3,
    "checkpoint-begin": 0,
    "checkpoint-files": 0,
    "checkpoint-written": 1,
    "checkpoint-summed": 1,
    "checkpoint-marked": 1,
    "checkpoint-renamed": 1,
    "checkpoint-latest": 1,
    "checkpoint-half-pruned": 0,
    "in-validation": 1,
    "before-the-result": 0,
}
MARKS = {
    ("mid-shard", "worker"): pytest.mark.slow,
    ("between-shard-and-marker", "supervisor"): pytest.mark.extended,
    ("checkpoint-marked", "agent"): pytest.mark.extended,
}
BY_SUPERVISOR = (
    "mid-shard",
    "between-shard-and-marker",
    "in-the-wait",
    "checkpoint-marked",
    "checkpoint-half-pruned",
    "before-the-result",
)
CASES = [(point, "worker") for point in POINTS] + [(point, "supervisor") for point in BY_SUPERVISOR]
CASES += [("checkpoint-marked", "agent"), ("in-the-wait", "agent")]


def as_if_nothing_had_happened(run: Run, unbroken: Run) -> None:
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


@pytest.mark.parametrize(
    ("point", "victim"),
    [pytest.param(*case, marks=MARKS.get(case, pytest.mark.faults)) for case in CASES],
)
def test_a_kill_leaves_no_trace(unbroken: Run, tmp_path: Path, point: str, victim: str) -> None:
    mark = tmp_path / "mark"
    run = Run(tmp_path, *SHORT, **stop_at(point, mark, nth=POINTS[point]))
    try:
        process = stopped(mark, run)
        if victim == "supervisor":
            run.process.kill()
            run.process.wait()
            wait_until(lambda: not members(run.path))
            run.begin("--resume", **stop_at(point, mark))
        else:
            (process if victim == "worker" else process.parent()).kill()
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        as_if_nothing_had_happened(run, unbroken)
    finally:
        run.end()
