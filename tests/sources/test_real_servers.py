"""Training through real servers of the field, on embedded models: `transformers serve`, and vLLM where it is."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from mutualrl.sources.answers import read_account, stored_accounts
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tiny import path_of
from runs import SHORT, FinishedRun, Run, members, verify_intact, wait_until

pytest.importorskip("openai")

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def started(command: Sequence[str | Path], port: int, model: str, log: Path, **environment: str) -> Iterator[str]:
    """Run a server until the block ends; return its URL once it answers a question."""
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("wb") as output:
        server = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        )

    def answers() -> bool:
        assert server.poll() is None, log.read_text()[-3000:]
        body = json.dumps({"model": model, "prompt": "2*3:", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    try:
        wait_until(answers)
        yield url
    finally:
        processes = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for process in processes:
            if process.is_running():
                process.kill()


def trained_through(url: str, model: str, directory: Path, *, kill: bool = False) -> FinishedRun:
    """Train one model on the answers of a server; with `kill`, kill the source and then the supervisor while it asks,
    and resume."""
    settings = {"model": model, "api": "completions", "temperature": 1.0, "samples": 2, "concurrency": 1}
    sets = [part for key, value in settings.items() for part in ("--set", f"sources.bob.{key}={value}")]
    directory.mkdir()
    arguments = ("--regime", "sgt", "--model", "tiny:ada", *SHORT, "--set", "trainer.max_completion_length=20")
    run = Run(directory, *arguments, "--source", f"bob=served:{url}", *sets, of=())

    def asked() -> list[Path]:
        return list((run.path / "exchange" / "bob").glob("answer-*"))

    try:
        if kill:
            wait_until(lambda: len(asked()) >= 3)
            run.worker("bob").kill()
            wait_until(lambda: (run.path / "exchange" / "bob" / "000000.json").exists() and len(asked()) >= 3)
            run.process.kill()
            run.process.wait()
            wait_until(lambda: not members(run.path))
            run.begin("--resume")
        assert run.process.wait(180) == 0, run.errors.read_text()[-3000:]
    finally:
        run.end()
    return run


def assert_taught(run: FinishedRun) -> None:
    """Fail unless a server's answers were confirmed and learnt."""
    directory = RunDirectory(run.path)
    accounts = [read_account(store_of(run), "bob", number) for number in stored_accounts(store_of(run), "bob")]
    assert len(accounts) == 3
    assert all(account is not None and account.failed == 0 and account.completion_tokens > 0 for account in accounts)
    assert sum(row.get("source/bob/rescues", 0) for row in run.metrics("ada")) > 0
    assert directory.policy("bob").result.exists()
    assert verify_intact(run.path)["damaged"] == []


def store_of(run: FinishedRun):  # type: ignore[no-untyped-def]
    from mutualrl.see.location import record_store

    return record_store(RunDirectory(run.path))


@pytest.mark.extended
@pytest.mark.skipif(find_spec("fastapi") is None, reason="transformers serve is not installed (transformers[serving])")
def test_a_model_is_trained_through_transformers_serve_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    model = tmp_path / "bob"
    shutil.copytree(path_of("bob"), model)
    settings = (
        json.loads((model / "generation_config.json").read_text())
        if (model / "generation_config.json").exists()
        else {}
    )
    (model / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))  # else it is greedy
    port = free_port()
    command = (BIN / "transformers", "serve", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    with started(command, port, str(model), tmp_path / "server.log") as url:
        unbroken = trained_through(url, str(model), tmp_path / "a")
        killed = trained_through(url, str(model), tmp_path / "b", kill=True)
    for run in (unbroken, killed):
        assert_taught(run)
    assert killed.weights() == unbroken.weights()
    rescues = [each.path / "policies" / "ada" / "rescues.jsonl" for each in (killed, unbroken)]
    assert rescues[0].read_bytes() == rescues[1].read_bytes()


@pytest.mark.release
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_model_is_trained_through_vllm_serve(tmp_path: Path) -> None:
    model, port = str(path_of("bob")), free_port()
    # what `vllm serve` runs: the CPU build has no metadata, which that command looks up
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--max-model-len", "64")
    limits = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    at = ("--host", "127.0.0.1", "--port", str(port), "--enforce-eager")
    with started((*command, *at), port, model, tmp_path / "server.log", **limits) as url:
        assert_taught(trained_through(url, model, tmp_path / "a"))
