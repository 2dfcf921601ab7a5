"""Runs on a Ray cluster of several raylets: the run of one machine, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import PATIENCE, Cli
from mutualrl.errors import RewardError
from ray_cluster import RayCluster, ray_cluster
from runs import SHORT, FinishedRun, Run, members, steps_of, stop_at, stopped, verified, wait_until

pytest.importorskip("ray", reason="Ray is not installed (pip install 'mutualrl[ray]')")
from ray._private.services import find_gcs_addresses

pytestmark = pytest.mark.slow

SGT = ("--regime", "sgt", "--pool", "tiny")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Three raylets with a CPU each: two policies of a thread each, and room for one whose raylet dies."""
    with ray_cluster(1, 1, 1) as cluster:
        yield cluster


def on(cluster: RayCluster) -> tuple[str, ...]:
    return ("--launcher", "ray", "--address", cluster.address)


def finished(run: Run) -> None:
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    finally:
        run.end()


def workers(run: Run) -> list[psutil.Process]:
    return [process for process in members(run.path) if "mutualrl.training.worker" in process.cmdline()]


def rank_of(run: Run, policy: str, number: str) -> psutil.Process:
    """Return the process of a rank of a policy."""
    ranks = [process.environ() | {"pid": process.pid} for process in workers(run)]
    (pid,) = (rank["pid"] for rank in ranks if rank["MUTUALRL_POLICY"] == policy and rank["RANK"] == number)
    return psutil.Process(pid)


def raylet_of(process: psutil.Process) -> int:
    """Return the process id of the raylet above a worker."""
    return next(parent.pid for parent in process.parents() if "raylet" in parent.name())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "auto"])
def test_a_cluster_that_is_not_there_is_named_before_ray_waits_for_it(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "localhost:1")
    absent = cli("train", *SGT, "--launcher", "ray", "--address", address, "--run-dir", tmp_path / "b")
    assert absent.returncode == 4
    words = " ".join(absent.stderr.split())
    assert f"--address {address}: no Ray cluster answers (" in words
    assert "gcs" not in words  # whose own search for it takes minutes


@pytest.mark.parametrize("ended", [None, "127.0.0.1:1", "no address"])
def test_a_cluster_that_has_ended_is_not_waited_for(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, ended: str | None
) -> None:
    """What the last `ray start` wrote down lies there when its machine was switched off."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if ended is not None:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(ended)
    if (running := find_gcs_addresses()) and len(running) < 2:
        pytest.skip(f"a Ray cluster runs here, and is the one that is taken: {running}")
    absent = cli("train", *SGT, "--launcher", "ray", "--address", "auto", "--run-dir", tmp_path / "b")
    assert absent.returncode == 4
    words = " ".join(absent.stderr.split())
    assert "--address auto: no Ray cluster answers (" in words
    why = {
        None: "Could not find any running Ray instance",
        "127.0.0.1:1": ":1: ",
        "no address": "Invalid address format",
    }
    assert why[ended] in words


def test_without_ray_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('not here')\n")
    answer = subprocess.run(
        [sys.executable, "-m", "mutualrl", "train", *SGT, "--launcher", "ray"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert answer.returncode == 4
    assert "pip install 'mutualrl[ray]'" in answer.stderr


@pytest.mark.extended
def test_whatever_dies_it_is_the_run_of_one_machine(unbroken: FinishedRun, tmp_path: Path) -> None:
    """A policy per raylet. A worker, the driver and a raylet are killed, each at a point that bob comes to."""
    points = ("in-generation:bob:1", "in-the-loss:bob:0", "in-generation:bob:0")
    with ray_cluster(1, 1, 1, **stop_at(*points, mark=tmp_path / "mark")) as cluster:
        run = Run(tmp_path, *SHORT, "--set", "run.save_every=2", *on(cluster))
        stopped(tmp_path / "mark", run, 0).kill()  # Ray starts it again
        stopped(tmp_path / "mark", run, 1)
        run.process.kill()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", *on(cluster))
        waiting = stopped(tmp_path / "mark", run, 2)
        bob = raylet_of(waiting)
        wait_until(lambda: len(workers(run)) == 2)
        ada = raylet_of(run.worker("ada"))
        assert ada != bob
        cluster.kill(ada if bob == cluster.head else bob)
        if bob == cluster.head:
            waiting.kill()
        finished(run)
    assert run.weights() == unbroken.weights()
    for policy in ("ada", "bob"):
        assert [row["step"] for row in run.metrics(policy)] == [row["step"] for row in unbroken.metrics(policy)]
    assert verified(run.path)


@pytest.mark.extended
def test_a_policy_over_two_raylets_stopped_and_killed_is_the_run_of_one_machine(tmp_path: Path) -> None:
    """Stopped with Ctrl-C; then the Ray worker of rank 1 is killed, and the raylet of rank 0, while the other rank waits
    for it."""
    arguments = (*SHORT, "--steps", "12", "--set", "launch.processes=2")
    arguments = (*arguments, "--set", "trainer.per_device_train_batch_size=16")
    (tmp_path / "local").mkdir()
    (tmp_path / "ray").mkdir()
    local = Run(tmp_path / "local", *arguments)
    finished(local)
    with ray_cluster(2, 1, 1, 1) as cluster:
        run = Run(tmp_path / "ray", *arguments, *on(cluster))
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
            run.begin("--resume", *on(cluster))
            for number in ("1", "0"):
                wait_until(lambda: len(workers(run)) == 4)
                rank, before = rank_of(run, split, number), steps_of(run.path, split)
                wait_until(lambda before=before: steps_of(run.path, split) > before)
                assert raylet_of(rank) != cluster.head
                if number == "1":
                    rank.parent().kill()
                else:
                    cluster.kill(raylet_of(rank))
                wait_until(lambda rank=rank: not rank.is_running())
        finally:
            finished(run)
    assert run.weights() == local.weights()


@pytest.mark.extended
def test_a_head_node_that_goes_away_is_named_and_the_run_resumes_on_another_cluster(
    unbroken: FinishedRun, tmp_path: Path
) -> None:
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "15"}  # of Ray, by default a minute
    with ray_cluster(1, 1, **stop_at("in-generation:bob:1", mark=tmp_path / "mark"), **patience) as cluster:
        run = Run(tmp_path, *SHORT, *on(cluster), **patience)
        waiting = stopped(tmp_path / "mark", run)
        psutil.Process(cluster.control_store).kill()
        assert run.process.wait(PATIENCE) != 0
        waiting.kill()
    assert f"head node of the Ray cluster ({cluster.address}) does not answer" in " ".join(
        run.errors.read_text().split()
    )
    wait_until(lambda: not members(run.path))
    with ray_cluster(1, 1) as cluster:
        run.begin("--resume", *on(cluster))
        finished(run)
    assert run.weights() == unbroken.weights()


OTHER_JOB = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(ray.util.placement_group([{"CPU": 1}, {"CPU": 1}]).ready())
print("has two CPUs", flush=True)
sys.stdin.read()
"""


@pytest.mark.extended
def test_a_policy_that_waits_for_room_is_named_and_ctrl_c_ends_the_wait(cluster: RayCluster, tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", OTHER_JOB, cluster.address], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "has two CPUs\n"
        run = Run(tmp_path, *SHORT, *on(cluster))
        try:
            wait_until(lambda: "waits for resources on the Ray cluster" in " ".join(run.errors.read_text().split()))
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(PATIENCE) == 130, run.errors.read_text()
        finally:
            run.end()
            assert job.stdin is not None
            job.stdin.close()


@pytest.mark.extended
def test_an_error_of_a_policys_own_is_said_and_not_repeated(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def broken(completions, answer, **columns):\n    raise ValueError('no judge today')\n"
    )
    run = Run(tmp_path, *SHORT, "--set", f"task.reward={tmp_path / 'judge.py'}:broken", *on(cluster))
    code = run.process.wait(PATIENCE)
    run.end()
    errors = run.errors.read_text()
    assert code == RewardError.exit_code, errors
    assert "reward function broken: ValueError: no judge today" in errors
    assert not list((run.path / "policies").glob("*/result.json"))


ENDINGS = """
import sys, time
import ray
from mutualrl.mwra.ray_worker import end_ranks
ray.init(address=sys.argv[1], log_to_driver=False)
train = ray.remote(lambda: time.sleep(0.01))
for _ in range(500):
    end_ranks([train.remote()])
print("all ended")
"""


@pytest.mark.extended
def test_ranks_that_end_by_themselves_are_not_cancelled(cluster: RayCluster) -> None:
    """Ray ends the process that cancels a task at the moment of its completion."""
    answer = subprocess.run(
        [sys.executable, "-c", ENDINGS, cluster.address], capture_output=True, text=True, check=False
    )
    assert answer.stdout.strip() == "all ended", answer.stderr[-2000:]


@pytest.mark.extended
def test_a_cluster_that_is_too_small_is_named(cluster: RayCluster, tmp_path: Path, cli: Cli) -> None:
    four = ("--set", "launch.processes=4", "--set", "trainer.per_device_train_batch_size=32")
    small = cli("train", *SGT, *on(cluster), *four, "--run-dir", tmp_path / "a")
    assert small.returncode == 4
    assert "8 CPUs requested, 3 available" in " ".join(small.stderr.split())
    gpus = cli("train", *SGT, *on(cluster), "--set", "hardware.gpus=2", "--run-dir", tmp_path / "c")
    assert gpus.returncode == 4
    assert "2 of the 2 GPUs" in " ".join(gpus.stderr.split())
