"""Real runs, real signals: whoever dies, no process of the run is left."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import Run, members, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tiny: dict[str, Path], tmp_path: Path) -> object:
    started: list[Run] = []

    def start(*extra: str, restarts: int = 0) -> Run:
        short = ("--steps", "3000", "--set", "run.validate_every=0", "--set", f"run.max_restarts={restarts}")
        started.append(Run(tmp_path, *short, *extra))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_every_process_carries_the_run_directory(run: Callable[..., Run]) -> None:
    started = run()
    started.until_training()
    below = psutil.Process(started.process.pid).children(recursive=True)
    assert len(below) >= 4
    assert {p.pid for p in below} == {p.pid for p in members(started.path)}


def test_a_supervisor_killed_while_training_leaves_nothing(run: Callable[..., Run]) -> None:
    started = run()
    started.until_training()
    assert len(members(started.path)) == 4
    started.process.kill()
    wait_until(lambda: not members(started.path), 5)


def test_a_supervisor_killed_while_starting_leaves_nothing(run: Callable[..., Run]) -> None:
    started = run()
    wait_until(lambda: bool(members(started.path)), 60)
    started.process.kill()
    wait_until(lambda: not members(started.path), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_run_with_130(run: Callable[..., Run], number: signal.Signals) -> None:
    started = run()
    started.until_training()
    started.process.send_signal(number)
    assert started.process.wait(20) == 130
    assert not members(started.path)
    assert f"stopped by {number.name}" in started.errors.read_text()


def test_a_dead_policy_ends_the_run_with_5_and_is_named(run: Callable[..., Run]) -> None:
    started = run()
    started.until_training()
    started.worker("bob").kill()
    assert started.process.wait(30) == 5
    assert not members(started.path)
    text = started.errors.read_text()
    assert "policy 'bob' died (exit code 137" in text
    assert str(started.path / "policies" / "bob" / "logs") in text
    assert not (started.path / "summary.json").exists()


def test_a_policy_that_is_told_to_stop_by_somebody_else_is_a_lost_one(run: Callable[..., Run]) -> None:
    started = run()
    started.until_training()
    started.worker("bob").terminate()
    assert started.process.wait(30) == 5
    assert not members(started.path)
    assert "policy 'bob' died" in started.errors.read_text()


def test_a_dead_agent_ends_the_run_with_5_and_takes_its_worker_along(run: Callable[..., Run]) -> None:
    started = run()
    started.until_training()
    (agent,) = [
        p for p in members(started.path) if "mutualrl.mwra.agent" in p.cmdline() and "--policy=ada" in p.cmdline()
    ]
    agent.kill()
    assert started.process.wait(30) == 5
    assert not members(started.path)
    assert "policy 'ada' died" in started.errors.read_text()


def test_a_frozen_policy_is_given_up_after_the_peer_timeout(run: Callable[..., Run]) -> None:
    started = run("--set", "run.peer_timeout=3.0")
    started.until_training()
    began = time.monotonic()
    started.worker("bob").suspend()
    assert started.process.wait(40) == 5
    assert time.monotonic() - began < 20
    assert not members(started.path)
    assert "lost its peer 'bob'" in started.errors.read_text()


def test_a_frozen_policy_is_found_out_where_nobody_waits_for_it(run: Callable[..., Run]) -> None:
    started = run("--set", "regime=grpo", "--set", "run.peer_timeout=1.5")
    started.until_training()
    started.worker("ada").suspend()
    assert started.process.wait(40) == 5
    assert not members(started.path)
    assert "policy 'ada' is frozen" in started.errors.read_text()


def test_a_policy_whose_plan_differs_is_refused_by_name(run: Callable[..., Run], tmp_path: Path) -> None:
    from mutualrl.errors import PlanMismatchError
    from mutualrl.training.plan import compare

    started = run()
    wait_until((started.path / "run.json").exists, 30)
    plan = json.loads((started.path / "run.json").read_text())["fingerprint"]
    compare("bob", dict(plan), plan)
    with pytest.raises(PlanMismatchError, match=r"policy 'bob'.*seed: 1, the run has 0"):
        compare("bob", {**plan, "seed": 1}, plan)
