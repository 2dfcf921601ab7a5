"""Two hosts (network namespaces with a cable between them) and one shared directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conftest import PATIENCE
from runs import Run, members, wait_until

pytestmark = pytest.mark.timeout(3600)

SHORT = (
    "--steps",
    "4",
    "--set",
    "run.validate_every=0",
    "--set",
    "run.validation_limit=4",
    "--set",
    "round.prompts=16",
    "--set",
    "run.save_every=2",
    "--set",
    "trainer.per_device_train_batch_size=16",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Yield (namespace, address, network interface) of each host."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make network namespaces")
    tag = uuid.uuid4().hex[:6]
    results = [(f"m{tag}{i}", f"10.77.0.{i + 1}", f"v{tag}{i}") for i in (0, 1)]
    created = []
    try:
        try:
            for name, _, _ in results:
                ip("netns", "add", name)
                created.append(name)
            ip(
                "link",
                "add",
                results[0][2],
                "netns",
                results[0][0],
                "type",
                "veth",
                "peer",
                "name",
                results[1][2],
                "netns",
                results[1][0],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces may not be made here: {error.stderr.decode().strip()}")
        for name, address, interface in results:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield results
    finally:
        for name in created:
            subprocess.run(["ip", "netns", "del", name], check=False)


class TwoHosts(Run):
    """One supervisor on each host."""

    def __init__(self, directory: Path, hosts: list[tuple[str, str, str]], *arguments: str) -> None:
        self.path = directory / "r"
        self.hosts = hosts
        self.directory = directory
        self.start(*arguments)

    def start(self, *arguments: str) -> None:
        self.processes = [
            subprocess.Popen(
                [
                    *(["ip", "netns", "exec", name] if name else []),
                    "taskset",
                    "-c",
                    str(rank % (os.cpu_count() or 1)),
                    sys.executable,
                    "-m",
                    "mutualrl",
                    "train",
                    "--nnodes",
                    "2",
                    "--node-rank",
                    str(rank),
                    "--master-addr",
                    address,
                    "--run-dir",
                    str(self.path),
                    *arguments,
                ],
                stdout=subprocess.DEVNULL,
                stderr=(self.directory / f"node-{rank}.txt").open("ab"),
                env={**os.environ, **({"GLOO_SOCKET_IFNAME": interface} if name else {}), "COLUMNS": "200"},
            )
            for rank, (name, address, interface) in enumerate(self.hosts)
        ]

    def said(self) -> str:
        return "\n".join((self.directory / f"node-{rank}.txt").read_text() for rank in (0, 1))

    def finish(self) -> None:
        assert [process.wait(PATIENCE) for process in self.processes] == [0, 0], self.said()
        assert not members(self.path)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in members(self.path):
            process.kill()


@pytest.mark.long
def test_a_policy_a_host(tiny: dict[str, Path], tmp_path: Path, hosts: list[tuple[str, str, str]]) -> None:
    """They share the exchange and no network connection, and compute what one machine would."""
    run = TwoHosts(tmp_path, hosts, "--regime", "sgt", *SHORT)
    try:
        run.finish()
        placement = json.loads((run.path / "run.json").read_text())["placement"]
        assert [placement[name]["nodes"] for name in ("ada", "bob")] == [[0], [1]]
        assert [line["see/peers"] for line in run.metrics("ada")] == [1] * 4
        (tmp_path / "alone").mkdir()
        alone = Run(tmp_path / "alone", *SHORT)
        assert alone.process.wait(PATIENCE) == 0, alone.errors.read_text()
        assert run.weights() == alone.weights()
    finally:
        run.end()


@pytest.mark.long
def test_a_policy_over_both_hosts_survives_a_death_on_either(
    tiny: dict[str, Path], tmp_path: Path, hosts: list[tuple[str, str, str]]
) -> None:
    policies = "policies=[{name: ada, model: 'tiny:ada'}]"
    unbroken = TwoHosts(tmp_path, hosts, "--set", policies, *SHORT)
    try:
        unbroken.finish()
        assert json.loads((unbroken.path / "run.json").read_text())["placement"]["ada"]["nodes"] == [0, 1]
    finally:
        unbroken.end()
    (tmp_path / "2").mkdir()
    run = TwoHosts(tmp_path / "2", hosts, "--set", policies, *SHORT)
    try:
        wait_until((run.path / "policies/ada/checkpoints/step-000002").exists)
        workers = [p for p in members(run.path) if "mutualrl.training.worker" in p.cmdline()]
        workers[-1].kill()
        run.finish()
        assert "Starting it again" in run.said()
        assert run.weights() == unbroken.weights()
        assert [line["step"] for line in run.metrics("ada")] == [1, 2, 3, 4]
    finally:
        run.end()


@pytest.mark.long
def test_a_host_that_is_gone_ends_the_run_by_name(
    tiny: dict[str, Path], tmp_path: Path, hosts: list[tuple[str, str, str]]
) -> None:
    run = TwoHosts(tmp_path, hosts, "--regime", "sgt", "--set", "run.peer_timeout=3.0", *SHORT, "--steps", "3000")
    try:
        wait_until((run.path / "policies/bob/metrics.jsonl").exists)
        run.processes[1].kill()
        assert run.processes[0].wait(PATIENCE) == 5
        assert "node 1 is lost" in run.said() or "lost its peer 'bob'" in run.said()
        wait_until(lambda: not members(run.path))
    finally:
        run.end()


#: two supervisors of one host: policies that do not span nodes need no network between them
SAME_HOST = [("", "127.0.0.1", "lo")] * 2


@pytest.mark.long
def test_a_policy_on_another_host_goes_on_where_one_may_be_lost(tiny: dict[str, Path], tmp_path: Path) -> None:
    run = TwoHosts(
        tmp_path,
        SAME_HOST,
        "--regime",
        "sgt",
        *SHORT,
        "--steps",
        "12",
        "--set",
        "run.on_peer_loss=continue",
        "--set",
        "run.max_restarts=0",
    )
    try:
        wait_until((run.path / "policies/ada/metrics.jsonl").exists)
        run.worker("ada").kill()
        run.finish()
        summary = json.loads((run.path / "summary.json").read_text())
        assert summary["lost"] == ["ada"]
        assert len(run.metrics("bob")) == 12
        assert run.metrics("bob")[-1]["see/peers"] == 0
    finally:
        run.end()


@pytest.mark.long
def test_a_silent_supervisor_is_named_and_its_policies_are_not_taken_for_finished(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Under grpo nobody waits for anybody: node 0 has finished, and node 1 says nothing any more."""
    run = TwoHosts(tmp_path, SAME_HOST, "--regime", "grpo", *SHORT, "--steps", "150", "--set", "run.peer_timeout=6.0")
    try:
        wait_until((run.path / "policies/bob/metrics.jsonl").exists)
        frozen = psutil.Process(run.processes[1].pid)
        frozen.suspend()
        assert run.processes[0].wait(PATIENCE) == 5
        assert "node 1 is lost: its supervisor has been silent for" in run.said()
        assert not (run.path / "summary.json").exists()
        frozen.resume()
        assert run.processes[1].wait(PATIENCE) == 5
        wait_until(lambda: not members(run.path))
    finally:
        run.end()
