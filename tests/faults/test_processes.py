"""Real runs, real signals: whoever dies, no process of the run is left."""

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
from runs import SHORT, FinishedRun, Run, hooked, members, stop_at, stopped, wait_until


@pytest.fixture
def run(tiny: dict[str, Path], tmp_path: Path) -> object:
    started: list[Run] = []

    def start(*extra: str, restarts: int = 0, steps: int = 3000, environment: dict[str, str] | None = None) -> Run:
        short = ("--steps", str(steps), "--set", "run.validate_every=0", "--set", f"run.max_restarts={restarts}")
        started.append(Run(tmp_path, *short, *extra, **(environment or {})))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_a_supervisor_killed_while_training_leaves_nothing(run: Callable[..., Run]) -> None:
    started = run()
    started.until_training()
    assert len(members(started.path)) == 4
    started.process.kill()
    wait_until(lambda: not members(started.path))


@pytest.mark.extended
def test_a_supervisor_killed_while_starting_leaves_nothing(run: Callable[..., Run]) -> None:
    started = run()
    wait_until(lambda: bool(members(started.path)))
    started.process.kill()
    wait_until(lambda: not members(started.path))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
def test_a_stop_signal_saves_checkpoints_and_ends_the_run_with_130(
    run: Callable[..., Run], number: signal.Signals
) -> None:
    started = run()
    started.until_training()
    started.process.send_signal(number)
    assert started.process.wait(PATIENCE) == 130
    assert not members(started.path)
    text = started.errors.read_text()
    assert f"stopped by {number.name}; checkpoints: ada at step" in text
    assert f"mutualrl train --resume --run-dir {started.path}" in text
    for policy in ("ada", "bob"):
        store = Checkpoints(started.path / "policies" / policy)
        (step,) = store.steps()
        store.verify(step)
        assert abs(step - len(started.metrics(policy))) <= 1


@pytest.mark.extended
def test_a_second_signal_stops_at_once(run: Callable[..., Run], tmp_path: Path) -> None:
    """A worker that never gets to the end of its step keeps the first signal waiting."""
    mark = tmp_path / "mark"
    started = run(environment=stop_at("in-the-loss:bob:2", mark=mark))
    stopped(mark, started)
    started.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Stopping: each policy" in started.errors.read_text())
    time.sleep(2)
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(PATIENCE) == 130
    assert not members(started.path)


@pytest.mark.extended
def test_a_worker_that_dies_is_started_again_until_its_restarts_are_spent(run: Callable[..., Run]) -> None:
    """Told to stop by somebody else; its agent killed; killed itself."""
    started = run("--set", "run.save_every=1", restarts=2)
    started.until_training()
    below = psutil.Process(started.process.pid).children(recursive=True)
    assert {process.pid for process in below} == {process.pid for process in members(started.path)}
    started.worker("bob").terminate()
    began_again(started, 1)
    worker = started.worker("bob")
    worker.parent().kill()
    began_again(started, 2)
    assert not alive(worker)
    assert started.process.poll() is None
    started.worker("bob").kill()
    assert started.process.wait(PATIENCE) == 5
    assert not members(started.path)
    text = started.errors.read_text()
    assert "policy 'bob' died (exit code 137, no error recorded)" in text
    assert "2 restart(s) used" in text
    assert str(started.path / "policies" / "bob" / "logs") in text
    assert not (started.path / "summary.json").exists()


def began_again(run: Run, restart: int) -> None:
    """Wait until bob has made steps in a further attempt."""
    wait_until(lambda: f"(restart {restart} of 2)" in run.errors.read_text())
    log = run.path / "policies" / "bob" / "logs" / f"attempt-{restart}.log"
    wait_until(lambda: log.exists() and "resuming from checkpoint step-" in log.read_text())
    steps = len(run.metrics("bob"))
    wait_until(lambda: len(run.metrics("bob")) > steps + 2)


@pytest.mark.extended
def test_the_others_go_on_without_a_lost_policy_when_they_may(run: Callable[..., Run]) -> None:
    """The survivor's metrics and the summary say so; a resumed run has the lost one back, and it catches up."""
    started = run("--set", "run.on_peer_loss=continue", "--set", "run.save_every=2", steps=12)
    started.until_training()
    started.worker("bob").kill()
    assert started.process.wait(PATIENCE) == 0, started.errors.read_text()
    lines = started.metrics("ada")
    assert len(lines) == 12
    peers = [line["see/peers"] for line in lines]
    assert peers == sorted(peers, reverse=True)
    assert (peers[0], peers[-1]) == (1, 0)
    summary = json.loads((started.path / "summary.json").read_text())
    assert summary["lost"] == ["bob"]
    assert set(summary["policies"]) == {"ada"}
    assert summary["policies"]["ada"]["lost_peers"] == {"bob": peers.index(0)}
    assert "It is lost; the others continue without it" in started.errors.read_text()
    started.begin("--resume")
    assert started.process.wait(PATIENCE) == 0, started.errors.read_text()
    assert [line["see/peers"] for line in started.metrics("bob")] == [1] * 12
    assert json.loads((started.path / "summary.json").read_text())["lost"] == []


@pytest.mark.extended
def test_a_frozen_worker_is_replaced_and_what_wakes_up_is_fenced_off(run: Callable[..., Run], tmp_path: Path) -> None:
    """The supervisor kills what it gives up. What it cannot reach (another machine's) is fenced off when it wakes."""
    started = run("--set", "run.peer_timeout=10.0", "--set", "run.save_every=2", restarts=1)
    started.until_training()
    frozen = started.worker("bob")
    frozen.suspend()
    wait_until(lambda: "policy 'bob' is frozen: no heartbeat for" in started.errors.read_text())
    wait_until(lambda: not frozen.is_running())
    steps = len(started.metrics("ada"))
    wait_until(lambda: len(started.metrics("ada")) > steps + 3)
    info = json.loads((started.path / "run.json").read_text())
    old = Exchange(started.path / "exchange", "bob", info["run_id"], attempt=0)
    with pytest.raises(FencedError, match="attempt 1 has started; this is attempt 0"):
        old.publish(10**6, [], 0)


@pytest.mark.extended
def test_a_frozen_policy_is_given_up_after_the_peer_timeout(run: Callable[..., Run]) -> None:
    started = run("--set", "run.peer_timeout=10.0")
    started.until_training()
    started.worker("bob").suspend()
    assert started.process.wait(PATIENCE) == 5
    assert not members(started.path)
    assert "policy 'bob' is frozen" in started.errors.read_text()


@pytest.mark.extended
def test_a_frozen_policy_is_found_out_where_nobody_waits_for_it(run: Callable[..., Run]) -> None:
    started = run("--set", "regime=grpo", "--set", "run.peer_timeout=10.0")
    started.until_training()
    started.worker("ada").suspend()
    assert started.process.wait(PATIENCE) == 5
    assert not members(started.path)
    assert "policy 'ada' is frozen" in started.errors.read_text()


def test_a_policy_whose_plan_differs_is_refused_by_name(run: Callable[..., Run], tmp_path: Path) -> None:
    from mutualrl.errors import PlanMismatchError
    from mutualrl.recipes.agreement import compare

    started = run()
    wait_until((started.path / "run.json").exists)
    plan = json.loads((started.path / "run.json").read_text())["fingerprint"]
    compare("bob", dict(plan), plan)
    with pytest.raises(PlanMismatchError, match=r"policy 'bob'.*seed: 1, the run has 0"):
        compare("bob", {**plan, "seed": 1}, plan)


@pytest.mark.extended
def test_a_second_run_on_the_directory_is_refused_before_anything_heavy(run: Callable[..., Run], cli: Cli) -> None:
    started = run()
    started.until_training()
    for extra in ((), ("--resume",), ("--clean",)):
        done = cli("train", "--run-dir", started.path, *extra, PYTHONPROFILEIMPORTTIME="1")
        assert done.returncode == 2, done.stderr
        assert f"process {started.process.pid}" in done.stderr
        assert not imported(done.stderr) & HEAVY
        if not extra:
            assert all(way in done.stderr for way in ("--resume", "--clean", "--run-dir"))
    assert started.process.poll() is None


STARTS = 8


@pytest.mark.extended
def test_of_many_starts_at_once_one_wins(tiny: dict[str, Path], tmp_path: Path) -> None:
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
    started = [
        subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(STARTS)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in started]
    codes = [process.returncode for process in started]
    assert sorted(codes) == [0] + [2] * (STARTS - 1)
    losers = [error for error, code in zip(errors, codes, strict=True) if code == 2]
    assert all("--run-dir" in error for error in losers)
    assert (tmp_path / "r" / "summary.json").exists()


@pytest.mark.extended
def test_a_stop_in_the_wait_leaves_no_trace(unbroken: FinishedRun, tmp_path: Path) -> None:
    """One policy waits for another that does not come: it saves the step it had made, as if the round had not begun."""
    mark = tmp_path / "mark"
    started = Run(tmp_path, *SHORT, **stop_at("in-generation:bob:2", mark=mark))
    try:
        stopped(mark, started)
        wait_until(lambda: "waiting for round 2" in (started.path / "exchange/ada/heartbeat.json").read_text())
        started.process.send_signal(signal.SIGINT)
        wait_until((started.path / "policies/ada/checkpoints/step-000004").exists)
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(PATIENCE) == 130
        assert "ada at step 4, bob at step 3" in started.errors.read_text()
        started.begin("--resume")
        assert started.process.wait(PATIENCE) == 0, started.errors.read_text()
        assert started.weights() == unbroken.weights()
        for policy in ("ada", "bob"):
            for key in ("num_tokens", "loss", "sgt/pairs"):
                assert [x.get(key) for x in started.metrics(policy)] == [x.get(key) for x in unbroken.metrics(policy)]
    finally:
        started.end()


def bob_on_two_ranks(directory: Path) -> tuple[str, ...]:
    (directory / "devices.yaml").write_text("policies: {ada: {processes: 1}, bob: {processes: 2}}\n")
    devices = str(directory / "devices.yaml")
    return ("--device-map", devices, "--set", "trainer.per_device_train_batch_size=16")


@pytest.mark.extended
def test_a_frozen_rank_is_found_out_whichever_it_is(run: Callable[..., Run], tmp_path: Path) -> None:
    started = run(*bob_on_two_ranks(tmp_path), "--set", "run.peer_timeout=10.0")
    started.until_training()
    workers = [p for p in members(started.path) if "mutualrl.training.worker" in p.cmdline()]
    (second,) = [p for p in workers if "--policy=bob" in p.cmdline() and p.environ()["RANK"] == "1"]
    second.suspend()
    assert started.process.wait(PATIENCE) == 5
    assert "policy 'bob' is frozen" in started.errors.read_text()
    assert "rank 1" in started.errors.read_text()
    assert not members(started.path)


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_what_a_worker_started_ends_with_it(run: Callable[..., Run], tmp_path: Path, victim: str) -> None:
    """A reward function's helper stands for an engine: it knows nothing of us, and its parent dies without a word."""
    (tmp_path / "helped.py").write_text(
        "import subprocess\nfrom mutualrl.tasks.boxed import boxed_reward\nhelper = []\n"
        "def score(**kwargs):\n"
        "    helper or helper.append(subprocess.Popen(['sleep', '987654'], start_new_session=True))\n"
        "    return boxed_reward(**kwargs)\n"
    )
    started = run("--set", f"task.reward={tmp_path}/helped.py:score", restarts=1)
    started.until_training()
    helpers = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987654"]]
    assert len(helpers) == 2
    worker = started.worker("bob")
    (own_items,) = [p for p in helpers if p.ppid() == worker.pid]
    worker.kill()
    if victim == "worker":
        wait_until(lambda: not alive(own_items))
        assert started.process.poll() is None
    started.process.kill()
    wait_until(lambda: not any(alive(p) for p in helpers) and not members(started.path))


@pytest.mark.extended
def test_a_final_save_longer_than_the_time_out_is_no_frozen_policy(tmp_path: Path) -> None:
    """Of two ranks: the one that has nothing to write waits for the other, and goes on beating."""
    slow = {"PYTHONPATH": hooked(), "FAULT_SAVE": "15"}
    run = Run(
        tmp_path,
        *SHORT,
        *bob_on_two_ranks(tmp_path),
        "--set",
        "run.peer_timeout=5.0",
        "--set",
        "run.max_restarts=0",
        **slow,
    )
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert "frozen" not in run.errors.read_text()
        assert len(run.weights()) == 2
        assert [len(list((run.path / "policies" / p / "logs").glob("*.log"))) for p in ("ada", "bob")] == [1, 1]
    finally:
        run.end()
