"""Runs under real signals: whichever process dies, no process of the run remains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import HEAVY, PATIENCE, Cli, imported
from mutualrl.errors import FencedError
from mutualrl.see import Exchange
from mutualrl.storage.checkpoints import Checkpoints
from runs import SHORT, FinishedRun, Run, members, pythonpath_with_hooks, stop_at, stopped, wait_until

pytestmark = pytest.mark.usefixtures("exec_workers")


@pytest.fixture
def start_run(tiny: dict[str, Path], tmp_path: Path) -> object:
    runs: list[Run] = []

    def start(*extra: str, restarts: int = 0, steps: int = 3000, environment: dict[str, str] | None = None) -> Run:
        short = ("--steps", str(steps), "--set", "run.validate_every=0", "--set", f"run.max_restarts={restarts}")
        runs.append(Run(tmp_path, *short, *extra, **(environment or {})))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def test_supervisor_killed_while_training_leaves_no_process(start_run: Callable[..., Run]) -> None:
    run = start_run()
    run.until_training()
    assert len(members(run.path)) == 4
    run.process.kill()
    wait_until(lambda: not members(run.path))


@pytest.mark.extended
def test_supervisor_killed_while_starting_leaves_no_process(start_run: Callable[..., Run]) -> None:
    run = start_run()
    wait_until(lambda: bool(members(run.path)))
    run.process.kill()
    wait_until(lambda: not members(run.path))


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
def test_stop_signals_save_checkpoints_and_exit_with_130(start_run: Callable[..., Run], signum: signal.Signals) -> None:
    run = start_run()
    run.until_training()
    run.process.send_signal(signum)
    assert run.process.wait(PATIENCE) == 130
    assert not members(run.path)
    errors = run.errors.read_text()
    assert f"stopped by {signum.name}; checkpoints: ada at step" in errors
    assert f"mutualrl train --resume --run-dir {run.path}" in errors
    for policy in ("ada", "bob"):
        checkpoints = Checkpoints(run.path / "policies" / policy)
        (step,) = checkpoints.steps()
        checkpoints.verify(step)
        assert abs(step - len(run.metrics(policy))) <= 1


@pytest.mark.release
def test_second_run_in_a_directory_is_rejected_and_second_signal_stops_immediately(
    start_run: Callable[..., Run], tmp_path: Path, cli: Cli
) -> None:
    """The second run is rejected before heavy imports. A worker that never finishes its step does not respond to the
    first signal."""
    mark = tmp_path / "mark"
    run = start_run(environment=stop_at("in-the-loss:bob:2", mark=mark))
    stopped(mark, run)
    for extra in ((), ("--resume",), ("--clean",)):
        result = cli("train", "--run-dir", run.path, *extra, PYTHONPROFILEIMPORTTIME="1")
        assert result.returncode == 2, result.stderr
        assert f"process {run.process.pid}" in result.stderr
        assert not imported(result.stderr) & HEAVY
        if not extra:
            assert all(option in result.stderr for option in ("--resume", "--clean", "--run-dir"))
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Stopping: each policy" in run.errors.read_text())
    time.sleep(2)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(PATIENCE) == 130
    assert not members(run.path)


@pytest.mark.release
def test_dead_workers_are_restarted_up_to_max_restarts(start_run: Callable[..., Run]) -> None:
    """The worker is terminated from outside; its agent is killed; the worker is killed."""
    run = start_run("--set", "run.save_every=1", restarts=2)
    run.until_training()
    descendants = psutil.Process(run.process.pid).children(recursive=True)
    assert {process.pid for process in descendants} == {process.pid for process in members(run.path)}
    run.worker("bob").terminate()
    wait_for_restart(run, 1)
    worker = run.worker("bob")
    worker.parent().kill()
    wait_for_restart(run, 2)
    assert not is_alive(worker)
    assert run.process.poll() is None
    run.worker("bob").kill()
    assert run.process.wait(PATIENCE) == 5
    assert not members(run.path)
    errors = run.errors.read_text()
    assert "policy 'bob' died (exit code 137, no error recorded" in errors
    assert "2 restart(s) used" in errors
    assert str(run.path / "policies" / "bob" / "logs") in errors
    assert not (run.path / "summary.json").exists()


def wait_for_restart(run: Run, restart: int) -> None:
    """Wait until bob has trained a few steps after this restart."""
    wait_until(lambda: f"(restart {restart} of 2)" in run.errors.read_text())
    log = run.path / "policies" / "bob" / "logs" / f"attempt-{restart}.log"
    wait_until(lambda: log.exists() and "resuming from checkpoint step-" in log.read_text())
    steps = len(run.metrics("bob"))
    wait_until(lambda: len(run.metrics("bob")) > steps + 2)


@pytest.mark.release
def test_on_peer_loss_continue_trains_on_without_a_lost_policy(start_run: Callable[..., Run]) -> None:
    """The survivor's metrics and the summary record the loss; in a resumed run, the lost policy catches up."""
    run = start_run("--set", "run.on_peer_loss=continue", "--set", "run.save_every=2", steps=12)
    run.until_training()
    run.worker("bob").kill()
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    rows = run.metrics("ada")
    assert len(rows) == 12
    peers = [row["see/peers"] for row in rows]
    assert peers == sorted(peers, reverse=True)
    assert (peers[0], peers[-1]) == (1, 0)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["lost"] == ["bob"]
    assert set(summary["policies"]) == {"ada"}
    assert summary["policies"]["ada"]["lost_peers"] == {"bob": peers.index(0)}
    assert "It is lost; the others continue without it" in run.errors.read_text()
    run.begin("--resume")
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    assert [row["see/peers"] for row in run.metrics("bob")] == [1] * 12
    assert json.loads((run.path / "summary.json").read_text())["lost"] == []


@pytest.mark.extended
def test_frozen_worker_is_replaced_and_its_old_attempt_fenced(start_run: Callable[..., Run], tmp_path: Path) -> None:
    """The supervisor kills a frozen worker. One on another machine, out of its reach, is fenced when it wakes up."""
    run = start_run("--set", "run.peer_timeout=10.0", "--set", "run.save_every=2", restarts=1)
    run.until_training()
    frozen = run.worker("bob")
    frozen.suspend()
    wait_until(lambda: "policy 'bob' is frozen: no heartbeat for" in run.errors.read_text())
    wait_until(lambda: not frozen.is_running())
    steps = len(run.metrics("ada"))
    wait_until(lambda: len(run.metrics("ada")) > steps + 3)
    info = json.loads((run.path / "run.json").read_text())
    old_attempt = Exchange(run.path / "exchange", "bob", info["run_id"], attempt=0)
    with pytest.raises(FencedError, match="attempt 1 has started; this is attempt 0"):
        old_attempt.publish(10**6, [], 0)
    run.worker("bob").suspend()  # no restart is left
    assert run.process.wait(PATIENCE) == 5
    assert not members(run.path)
    assert "policy 'bob' is frozen" in run.errors.read_text()


@pytest.mark.release
def test_frozen_policy_is_detected_when_no_peer_waits_for_it(start_run: Callable[..., Run]) -> None:
    run = start_run("--set", "regime=grpo", "--set", "run.peer_timeout=10.0")
    run.until_training()
    run.worker("ada").suspend()
    assert run.process.wait(PATIENCE) == 5
    assert not members(run.path)
    assert "policy 'ada' is frozen" in run.errors.read_text()


def test_differing_plan_is_rejected_with_policy_and_setting(start_run: Callable[..., Run], tmp_path: Path) -> None:
    from mutualrl.errors import PlanMismatchError
    from mutualrl.recipes.agreement import compare

    run = start_run()
    wait_until((run.path / "run.json").exists)
    plan = json.loads((run.path / "run.json").read_text())["fingerprint"]
    compare("bob", dict(plan), plan)
    with pytest.raises(PlanMismatchError, match=r"policy 'bob'.*seed: 1, the run has 0"):
        compare("bob", {**plan, "seed": 1}, plan)


STARTS = 8


@pytest.mark.release
def test_one_of_many_simultaneous_starts_wins(tiny: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text('policies: [{name: ada, model: "tiny:ada"}]\n')
    command = [
        sys.executable,
        "-m",
        "mutualrl",
        "train",
        "--pool",
        str(tmp_path / "one.yaml"),
        "--regime",
        "grpo",
        "--steps",
        "1",
        "--run-dir",
        str(tmp_path / "r"),
        "--set",
        "run.validation_limit=4",
    ]
    processes = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(STARTS)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0] + [2] * (STARTS - 1)
    losing = [error for error, code in zip(errors, codes, strict=True) if code == 2]
    assert all("--run-dir" in error for error in losing)
    assert (tmp_path / "r" / "summary.json").exists()


@pytest.mark.release
def test_stop_during_a_wait_does_not_change_the_resumed_run(unbroken: FinishedRun, tmp_path: Path) -> None:
    """A policy that waits in vain for another saves its last step, as if the round had not run."""
    mark = tmp_path / "mark"
    run = Run(tmp_path, *SHORT, **stop_at("in-generation:bob:2", mark=mark))
    try:
        stopped(mark, run)
        wait_until(lambda: "waiting for round 2" in (run.path / "exchange/ada/heartbeat.json").read_text())
        run.process.send_signal(signal.SIGINT)
        wait_until((run.path / "policies/ada/checkpoints/step-000004").exists)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(PATIENCE) == 130
        assert "ada at step 4, bob at step 3" in run.errors.read_text()
        run.begin("--resume")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert run.weights() == unbroken.weights()
        for policy in ("ada", "bob"):
            for key in ("num_tokens", "loss", "sgt/pairs"):
                assert [row.get(key) for row in run.metrics(policy)] == [
                    row.get(key) for row in unbroken.metrics(policy)
                ]
    finally:
        run.end()


def bob_on_two_ranks(directory: Path) -> tuple[str, ...]:
    (directory / "devices.yaml").write_text("policies: {ada: {processes: 1}, bob: {processes: 2}}\n")
    devices = str(directory / "devices.yaml")
    return ("--device-map", devices, "--set", "trainer.per_device_train_batch_size=16")


@pytest.mark.release
def test_frozen_rank_other_than_0_is_detected(start_run: Callable[..., Run], tmp_path: Path) -> None:
    run = start_run(*bob_on_two_ranks(tmp_path), "--set", "run.peer_timeout=10.0")
    run.until_training()
    workers = [p for p in members(run.path) if "mutualrl.training.worker" in p.cmdline()]
    (rank1,) = [p for p in workers if "--policy=bob" in p.cmdline() and p.environ()["RANK"] == "1"]
    rank1.suspend()
    assert run.process.wait(PATIENCE) == 5
    assert "policy 'bob' is frozen" in run.errors.read_text()
    assert "rank 1" in run.errors.read_text()
    assert not members(run.path)


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.release
@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_child_processes_end_with_their_worker(start_run: Callable[..., Run], tmp_path: Path, victim: str) -> None:
    """A reward function's helper stands in for an engine: a process that does not notice that its parent is killed."""
    (tmp_path / "helped.py").write_text(
        "import subprocess\nfrom mutualrl.tasks.boxed import boxed_reward\nhelper = []\n"
        "def score(**kwargs):\n"
        "    helper or helper.append(subprocess.Popen(['sleep', '987654'], start_new_session=True))\n"
        "    return boxed_reward(**kwargs)\n"
    )
    run = start_run("--set", f"task.reward={tmp_path}/helped.py:score", restarts=1)
    run.until_training()
    helpers = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987654"]]
    assert len(helpers) == 2
    worker = run.worker("bob")
    (bob_helper,) = [p for p in helpers if p.ppid() == worker.pid]
    worker.kill()
    if victim == "worker":
        wait_until(lambda: not is_alive(bob_helper))
        assert run.process.poll() is None
    run.process.kill()
    wait_until(lambda: not any(is_alive(p) for p in helpers) and not members(run.path))


@pytest.mark.release
def test_final_save_longer_than_the_peer_timeout_is_not_a_frozen_policy(tmp_path: Path) -> None:
    """The rank that does not write waits for the other one and keeps sending heartbeats."""
    slow_save = {"PYTHONPATH": pythonpath_with_hooks(), "FAULT_SAVE": "15"}
    run = Run(
        tmp_path,
        *SHORT,
        *bob_on_two_ranks(tmp_path),
        "--set",
        "run.peer_timeout=5.0",
        "--set",
        "run.max_restarts=0",
        **slow_save,
    )
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert "frozen" not in run.errors.read_text()
        assert len(run.weights()) == 2
        assert [len(list((run.path / "policies" / p / "logs").glob("*.log"))) for p in ("ada", "bob")] == [1, 1]
    finally:
        run.end()
