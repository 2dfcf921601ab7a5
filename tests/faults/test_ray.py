"""Runs on a Ray cluster of several raylets train the same weights as on one machine, whichever process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from endpoint import Endpoint, prompt_of, served

from conftest import PATIENCE, Cli
from mutualrl.errors import RewardError
from mutualrl.tasks import TaskSource, get_task
from ray_cluster import RayCluster, ray_cluster
from runs import SHORT, FinishedRun, Run, logged_steps, members, stop_at, stopped, verify_intact, wait_until

pytest.importorskip("ray", reason="Ray is not installed (pip install 'mutualrl[ray]')")
from ray._private.services import find_gcs_addresses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exec_workers")]

SGT = ("--regime", "sgt", "--pool", "tiny")
KEY = "sk-secret-77ab"


def solution(prompt: str) -> str:
    """Return the answer of an arithmetic prompt."""
    return {each.text: each.answer for each in get_task("arithmetic").read("train", TaskSource()).prompts}[prompt]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Run three raylets with one CPU each: two policies of one thread, and a spare raylet."""
    with ray_cluster(1, 1, 1) as cluster:
        yield cluster


def ray_options(cluster: RayCluster) -> tuple[str, ...]:
    return ("--launcher", "ray", "--address", cluster.address)


def finish(run: Run) -> None:
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    finally:
        run.end()


def workers(run: Run) -> list[psutil.Process]:
    return [process for process in members(run.path) if "mutualrl.training.worker" in process.cmdline()]


def rank_of(run: Run, policy: str, number: str) -> psutil.Process:
    """Return the process of one rank of a policy."""
    ranks = [process.environ() | {"pid": process.pid} for process in workers(run)]
    (pid,) = (rank["pid"] for rank in ranks if rank["MUTUALRL_POLICY"] == policy and rank["RANK"] == number)
    return psutil.Process(pid)


def raylet_of(process: psutil.Process) -> int:
    """Return the process id of the raylet above a worker."""
    return next(parent.pid for parent in process.parents() if "raylet" in parent.name())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "auto"])
def test_absent_cluster_is_reported_before_ray_waits_for_it(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "localhost:1")
    result = cli("train", *SGT, "--launcher", "ray", "--address", address, "--run-dir", tmp_path / "b")
    assert result.returncode == 4
    message = " ".join(result.stderr.split())
    assert f"--address {address}: no Ray cluster answers (" in message
    assert "gcs" not in message  # Ray's own search for the GCS takes minutes


@pytest.mark.parametrize("recorded", [None, "127.0.0.1:1", "no address"])
def test_auto_does_not_wait_for_a_stopped_cluster(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, recorded: str | None
) -> None:
    """The address recorded by the last `ray start` remains after a power cut."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if recorded is not None:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(recorded)
    if (running := find_gcs_addresses()) and len(running) < 2:
        pytest.skip(f"a Ray cluster runs on this machine and would be used: {running}")
    result = cli("train", *SGT, "--launcher", "ray", "--address", "auto", "--run-dir", tmp_path / "b")
    assert result.returncode == 4
    message = " ".join(result.stderr.split())
    assert "--address auto: no Ray cluster answers (" in message
    reasons = {
        None: "Could not find any running Ray instance",
        "127.0.0.1:1": ":1: ",
        "no address": "Invalid address format",
    }
    assert reasons[recorded] in message


def test_error_without_ray_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('not here')\n")
    result = subprocess.run(
        [sys.executable, "-m", "mutualrl", "train", *SGT, "--launcher", "ray"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert result.returncode == 4
    assert "pip install 'mutualrl[ray]'" in result.stderr


@pytest.mark.release
def test_killed_worker_driver_and_raylet_do_not_change_the_weights(unbroken: FinishedRun, tmp_path: Path) -> None:
    """One policy per raylet. A worker, the driver and a raylet are killed, each when bob reaches a point."""
    points = ("in-generation:bob:1", "in-the-loss:bob:0", "in-generation:bob:0")
    with ray_cluster(1, 1, 1, **stop_at(*points, mark=tmp_path / "mark")) as cluster:
        run = Run(tmp_path, *SHORT, "--set", "run.save_every=2", *ray_options(cluster))
        stopped(tmp_path / "mark", run, 0).kill()  # Ray restarts it
        stopped(tmp_path / "mark", run, 1)
        run.process.kill()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", *ray_options(cluster))
        worker = stopped(tmp_path / "mark", run, 2)
        bob = raylet_of(worker)
        wait_until(lambda: len(workers(run)) == 2)
        ada = raylet_of(run.worker("ada"))
        assert ada != bob
        cluster.kill(ada if bob == cluster.head else bob)
        if bob == cluster.head:
            worker.kill()
        finish(run)
    assert run.weights() == unbroken.weights()
    for policy in ("ada", "bob"):
        assert [row["step"] for row in run.metrics(policy)] == [row["step"] for row in unbroken.metrics(policy)]
    assert verify_intact(run.path)


@pytest.mark.release
def test_policy_over_two_raylets_stopped_and_killed_trains_the_weights_of_one_machine(tmp_path: Path) -> None:
    """Stop with Ctrl-C; then kill rank 1's Ray worker and rank 0's raylet, each while the other rank waits."""
    arguments = (*SHORT, "--steps", "12", "--set", "launch.processes=2")
    arguments = (*arguments, "--set", "trainer.per_device_train_batch_size=16")
    (tmp_path / "local").mkdir()
    (tmp_path / "ray").mkdir()
    local = Run(tmp_path / "local", *arguments)
    finish(local)
    with ray_cluster(2, 1, 1, 1) as cluster:
        run = Run(tmp_path / "ray", *arguments, *ray_options(cluster))
        try:
            run.until_training()
            assert len(workers(run)) == 4
            raylets: dict[str, set[int]] = {"ada": set(), "bob": set()}
            for worker in workers(run):
                raylets[worker.environ()["MUTUALRL_POLICY"]].add(raylet_of(worker))
            assert sorted(map(len, raylets.values())) == [1, 2]
            split = max(raylets, key=lambda policy: len(raylets[policy]))
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(PATIENCE) == 130, run.errors.read_text()
            assert "checkpoints: ada at step" in run.errors.read_text()
            wait_until(lambda: not members(run.path))
            run.begin("--resume", *ray_options(cluster))
            for number in ("1", "0"):
                wait_until(lambda: len(workers(run)) == 4)
                rank, before = rank_of(run, split, number), logged_steps(run.path, split)
                wait_until(lambda before=before: logged_steps(run.path, split) > before)
                assert raylet_of(rank) != cluster.head
                if number == "1":
                    rank.parent().kill()
                else:
                    cluster.kill(raylet_of(rank))
                wait_until(lambda rank=rank: not rank.is_running())
        finally:
            finish(run)
    assert run.weights() == local.weights()


@pytest.mark.release
def test_lost_head_node_is_reported_and_the_run_resumes_on_another_cluster(
    unbroken: FinishedRun, tmp_path: Path
) -> None:
    timeouts = {"RAY_gcs_rpc_server_reconnect_timeout_s": "15"}  # Ray's default is a minute
    with ray_cluster(1, 1, **stop_at("in-generation:bob:1", mark=tmp_path / "mark"), **timeouts) as cluster:
        run = Run(tmp_path, *SHORT, *ray_options(cluster), **timeouts)
        worker = stopped(tmp_path / "mark", run)
        psutil.Process(cluster.control_store).kill()
        assert run.process.wait(PATIENCE) != 0
        worker.kill()
    assert f"head node of the Ray cluster ({cluster.address}) does not answer" in " ".join(
        run.errors.read_text().split()
    )
    wait_until(lambda: not members(run.path))
    with ray_cluster(1, 1) as cluster:
        run.begin("--resume", *ray_options(cluster))
        finish(run)
    assert run.weights() == unbroken.weights()


def taught(endpoint: Endpoint) -> tuple[str, ...]:
    """Return a served source with a key, and a frozen one."""
    keys = {"concurrency": 4, "retries": 1, "timeout": 20, "samples": 2, "api_key_env": "TEACHER_KEY"}
    sets = [part for key, value in keys.items() for part in ("--set", f"sources.teacher.{key}={value}")]
    return ("--source", f"teacher=served:{endpoint.url}", *sets, "--source", "old=frozen:tiny:cyd")


@pytest.mark.extended
def test_asked_sources_are_tasks_of_the_cluster_and_teach_what_they_teach_on_one_machine(tmp_path: Path) -> None:
    """Each asks once for all learners; killed, it is started again; the key reaches the served source's process only."""
    with served(Endpoint(lambda prompt, seed: f" \\boxed{{{solution(prompt)}}}")) as endpoint:
        options = (*SGT, *SHORT, *taught(endpoint))
        (tmp_path / "local").mkdir()
        (tmp_path / "ray").mkdir()
        local = Run(tmp_path / "local", *options, of=(), TEACHER_KEY=KEY)
        finish(local)
        asked_there = Counter(map(prompt_of, endpoint.asked[1:]))  # after the question before the start
        endpoint.asked.clear()
        with ray_cluster(1, 1) as cluster:
            run = Run(tmp_path / "ray", *options, *ray_options(cluster), of=(), TEACHER_KEY=KEY)
            try:
                wait_until(lambda: logged_steps(run.path, "ada") > 0 or run.process.poll() is not None)
                with_key = [each for each in members(run.path) if each.environ().get("TEACHER_KEY") == KEY]
                assert {each.environ()["MUTUALRL_POLICY"] for each in with_key} == {"teacher"}
                run.worker("teacher").kill()
            finally:
                finish(run)
        asked_here = Counter(map(prompt_of, endpoint.asked[1:]))
    assert "source 'teacher'" in run.errors.read_text() or "policy 'teacher'" in run.errors.read_text()
    assert run.weights() == local.weights()
    assert set(asked_here) == set(asked_there)
    rescues = [(each.path / "policies" / "ada" / "rescues.jsonl").read_bytes() for each in (run, local)]
    assert rescues[0] == rescues[1]
    assert {json.loads(line)["peer"] for line in rescues[0].splitlines()} >= {"teacher"}
    verify_intact(run.path)
    for path in run.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


OTHER_JOB = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(ray.util.placement_group([{"CPU": 1}, {"CPU": 1}]).ready())
print("has two CPUs", flush=True)
sys.stdin.read()
"""


@pytest.mark.release
def test_wait_for_resources_is_reported_and_ended_by_ctrl_c(cluster: RayCluster, tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", OTHER_JOB, cluster.address], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "has two CPUs\n"
        run = Run(tmp_path, *SHORT, *ray_options(cluster))
        try:
            wait_until(lambda: "waits for resources on the Ray cluster" in " ".join(run.errors.read_text().split()))
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(PATIENCE) == 130, run.errors.read_text()
        finally:
            run.end()
            assert job.stdin is not None
            job.stdin.close()


@pytest.mark.extended
def test_reward_errors_are_reported_and_not_retried(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def broken(completions, answer, **columns):\n    raise ValueError('no judge today')\n"
    )
    run = Run(tmp_path, *SHORT, "--set", f"task.reward={tmp_path / 'judge.py'}:broken", *ray_options(cluster))
    code = run.process.wait(PATIENCE)
    run.end()
    errors = run.errors.read_text()
    assert code == RewardError.exit_code, errors
    assert "reward function broken: ValueError: no judge today" in errors
    assert not list((run.path / "policies").glob("*/result.json"))


END_RANKS = """
import sys, time
import ray
from mutualrl.launch.ray_worker import end_ranks
ray.init(address=sys.argv[1], log_to_driver=False)
train = ray.remote(lambda: time.sleep(0.01))
for _ in range(500):
    end_ranks([train.remote()])
print("all ended")
"""


@pytest.mark.extended
def test_ranks_that_end_on_their_own_are_not_cancelled(cluster: RayCluster) -> None:
    """Ray terminates a process that cancels a task just as the task completes."""
    result = subprocess.run(
        [sys.executable, "-c", END_RANKS, cluster.address], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "all ended", result.stderr[-2000:]


@pytest.mark.extended
def test_too_small_cluster_is_reported(cluster: RayCluster, tmp_path: Path, cli: Cli) -> None:
    four_ranks = ("--set", "launch.processes=4", "--set", "trainer.per_device_train_batch_size=32")
    cpus = cli("train", *SGT, *ray_options(cluster), *four_ranks, "--run-dir", tmp_path / "a")
    assert cpus.returncode == 4
    assert "8 CPUs requested, 3 available" in " ".join(cpus.stderr.split())
    gpus = cli("train", *SGT, *ray_options(cluster), "--set", "hardware.gpus=2", "--run-dir", tmp_path / "c")
    assert gpus.returncode == 4
    assert "2 of the 2 GPUs" in " ".join(gpus.stderr.split())
