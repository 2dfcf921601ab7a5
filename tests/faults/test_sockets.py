"""The listening sockets of a run: all on the loopback address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from conftest import PATIENCE, needs_zero, on_core, xdist_worker_number
from mutualrl.process import loopback
from runs import Run, members

SMALL = ("--steps", "1", "--set", "run.validation_limit=4", "--no-report")


def listening(process: psutil.Process) -> Iterator[str]:
    """Yield the addresses on which a process and its descendants listen."""
    for each in [process, *process.children(recursive=True)]:
        try:
            connections = each.net_connections(kind="inet")
        except psutil.Error:  # it has ended
            continue
        yield from (connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN)


def addresses_of(command: list[str], directory: Path) -> set[str]:
    """Return all addresses on which a command and its descendants listened until it ended with 0."""
    seen: set[str] = set()
    with on_core(xdist_worker_number()), (directory / "out.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            seen |= set(listening(psutil.Process(process.pid)))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    assert process.wait(PATIENCE) == 0, (directory / "out.txt").read_text()
    return seen


REWARD = """
import socket
def with_tool(completions, **columns):
    with socket.create_server(("127.0.0.1", 0)):
        return [0.0] * len(completions)
"""


@pytest.mark.slow
def test_ranks_of_a_policy_listen_on_the_loopback_only(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(REWARD)
    (tmp_path / "one.yaml").write_text("policies: [{name: ada, model: 'tiny:ada'}]\ntask: arithmetic\n")
    sizes = (
        "launch.processes=2",
        "round.prompts=8",
        "trainer.per_device_train_batch_size=16",
        "task.reward=r.py:with_tool",
    )
    settings = [word for size in (*sizes, "trainer.num_generations=4") for word in ("--set", size)]
    command = [sys.executable, "-m", "mutualrl", "train", "--regime", "grpo", "--pool", "one.yaml"]
    assert addresses_of([*command, *SMALL, *settings, "--run-dir", "r"], tmp_path) == {"127.0.0.1"}


@needs_zero
@pytest.mark.extended
@pytest.mark.slow
def test_deepspeed_of_one_process_listens_on_the_loopback_only(tmp_path: Path, zero_ready: None) -> None:
    (tmp_path / "one.yaml").write_text("policies: [{name: ada, model: 'tiny:ada'}]\ntask: arithmetic\n")
    command = [sys.executable, "-m", "mutualrl", "train", "--regime", "grpo", "--pool", "one.yaml"]
    command += [*SMALL, "--set", "launch.strategy=zero2", "--run-dir", "r"]
    assert addresses_of(command, tmp_path) == {"127.0.0.1"}


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
def test_engine_of_a_policy_listens_on_the_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.yaml").write_text("policies: [{name: ada, model: 'tiny:ada'}]\ntask: arithmetic\n")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    command = [sys.executable, "-m", "mutualrl", "train", "--regime", "grpo", "--pool", "one.yaml"]
    command += [*SMALL, "--set", "trainer.use_vllm=true", "--set", "run.validate_every=0", "--run-dir", "r"]
    for key in ("vllm_gpu_memory_utilization=0.2", "vllm_max_model_length=128"):
        command += ["--set", f"trainer.{key}"]
    assert addresses_of(command, tmp_path) <= {"127.0.0.1"}


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ranks_under_ray_listen_on_the_loopback_only(tmp_path: Path, exec_workers: None) -> None:
    from ray_cluster import ray_cluster

    (tmp_path / "one.yaml").write_text("policies: [{name: ada, model: 'tiny:ada'}]\ntask: arithmetic\n")
    of = ("--regime", "grpo", "--pool", str(tmp_path / "one.yaml"), "--set", "launch.processes=2")
    sizes = ("--set", "round.prompts=8", "--set", "trainer.per_device_train_batch_size=16")
    seen: set[str] = set()
    with ray_cluster(2) as cluster:
        run = Run(tmp_path, *SMALL, *sizes, "--launcher", "ray", "--address", cluster.address, of=of)
        try:
            deadline = time.monotonic() + PATIENCE
            while run.process.poll() is None and time.monotonic() < deadline:
                for member in members(run.path):
                    seen |= set(listening(member))
                time.sleep(0.1)
            assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        finally:
            run.end()
    assert seen == {"127.0.0.1"}


def test_store_listens_on_its_own_address() -> None:
    code = (
        "import psutil, torch.distributed as d\n"
        "from mutualrl.process import loopback\n"
        "loopback.bind_stores()\n"
        "import os; os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=os.environ['PORT'], RANK='0', WORLD_SIZE='1')\n"
        "d.init_process_group('gloo')\n"
        "print({c.laddr.ip for c in psutil.Process().net_connections() if c.status == 'LISTEN'})\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {"PORT": str(port), "PATH": "", "GLOO_SOCKET_IFNAME": str(loopback.interface())}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=PATIENCE,
    )
    assert result.stdout == "{'127.0.0.1'}\n", result.stderr


def test_interfaces_that_the_user_chose_are_kept() -> None:
    name = loopback.interface()
    assert loopback.variables({}) == {
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": name,
        "VLLM_HOST_IP": "127.0.0.1",
    }
    assert loopback.variables({"NCCL_SOCKET_IFNAME": "ib0"}) == {
        "GLOO_SOCKET_IFNAME": name,
        "VLLM_HOST_IP": "127.0.0.1",
    }
