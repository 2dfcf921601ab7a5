"""vLLM in the trainer, on CPU. Server mode moves weights over NCCL, so only its settings are tested here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import PATIENCE
from mutualrl.see import Exchange
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks import TaskSource, get_task
from mutualrl.training.vllm_generation import vllm_keys

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
@pytest.mark.slow
def test_engine_has_the_trainers_weights_and_its_traces_are_published(tiny: dict[str, Path], tmp_path: Path) -> None:
    script = Path(__file__).with_name("vllm_script.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tiny["ada"]), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    measurements: dict[str, Any] = json.loads((tmp_path / "measurements.json").read_text())
    # vLLM computes in bfloat16 here, so a near tie may be broken differently
    assert measurements["agreement_before"] > 0.8
    assert measurements["agreement_after_training"] > 0.8
    assert measurements["difference_before"] < 0.03
    assert measurements["difference_stale"] > 0.1
    assert measurements["difference_in_step"] < 0.03
    assert measurements["rng_untouched"]
    assert measurements["same_seed"]
    assert measurements["other_seed"]
    assert all(measurements["traces"])
    for row in measurements["kept"]:
        assert 0.9 < row["sampling/importance_sampling_ratio/mean"] < 1.1


@needs_vllm
@pytest.mark.slow
def test_two_policies_train_with_vllm_from_the_command_line(cli: Any, tmp_path: Path) -> None:
    result = cli(
        "train",
        "--regime",
        "prp",
        "--pool",
        "tiny",
        "--steps",
        "3",
        "--run-dir",
        tmp_path / "run",
        "--json",
        "--set",
        "trainer.use_vllm=true",
        "--set",
        "trainer.vllm_gpu_memory_utilization=0.2",
        "--set",
        "trainer.vllm_max_model_length=128",
        "--set",
        "run.validate_every=1",
        timeout=PATIENCE,
        **ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for policy in ("ada", "bob"):
        files = tmp_path / "run" / "policies" / policy
        rows = [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]
        assert [row["prp/rows"] + row["prp/unencodable"] for row in rows] == [128.0] * 3
        assert all("sampling/importance_sampling_ratio/mean" in row for row in rows)
        assert rows[0]["validation"]["n"] == 64
        assert "Traceback" not in (files / "logs" / "attempt-0.log").read_text()


@needs_vllm
@pytest.mark.slow
def test_two_policies_train_with_vllm_under_fsdp2(cli: Any, tmp_path: Path) -> None:
    """Two processes each; the engine has the weights of the step: before training, when they are whole, and after, when
    each process has a part."""
    options = ["--set", "trainer.use_vllm=true", "--set", "trainer.vllm_gpu_memory_utilization=0.1"]
    options += ["--set", "trainer.vllm_max_model_length=128", "--set", "run.validation_limit=4", "--steps", "3"]
    options += ["--set", "launch.strategy=fsdp2", "--set", "launch.processes=2"]
    options += ["--set", "trainer.per_device_train_batch_size=64", "--set", "trainer.learning_rate=0.01"]
    run = tmp_path / "run"
    result = cli(
        *("train", "--regime", "sgt", "--pool", "tiny", "--run-dir", run, "--json", *options),
        timeout=PATIENCE,
        **ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for policy in ("ada", "bob"):
        lines = (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()
        differences = [json.loads(line)["sampling/sampling_logp_difference/mean"] for line in lines]
        assert len(differences) == 3
        assert max(differences) < 0.05


@needs_vllm
@pytest.mark.slow
def test_vllm_samples_with_hints(cli: Any, tmp_path: Path) -> None:
    """The engine of training samples the regime's requests, with the weights of the step; answers are confirmed at the
    rate of transformers, and their ratios are taken of the trainer's log-probs."""
    options = ["--set", "trainer.use_vllm=true", "--set", "trainer.vllm_gpu_memory_utilization=0.2"]
    options += ["--set", "trainer.vllm_max_model_length=160", "--set", "run.validate_every=0", "--steps", "3"]
    options += ["--set", "regime.loss=policy_gradient", "--set", "regime.samples=2"]
    run = tmp_path / "run"
    result = cli(
        *("train", "--regime", "hinted", "--pool", "tiny-hints", "--run-dir", run, "--json", *options),
        timeout=PATIENCE,
        **ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for policy in ("hal", "ivy"):
        lines = (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()
        rows = [row for line in lines if "hinted/samples" in (row := json.loads(line))]
        assert len(rows) == 3
        assert sum(row["hinted/samples"] for row in rows) > 0
        assert sum(row["plan/samples_left_out"] for row in rows) == 0
        assert sum(row["hinted/success_rate"] for row in rows) / 3 > 0.3
        assert all(0 < row["hinted/ratio"] < 100 for row in rows if row["hinted/confirmed"])


@needs_vllm
@pytest.mark.slow
def test_vllm_samples_further_prompts(cli: Any, tmp_path: Path) -> None:
    """Dynamic sampling: the importance ratios and log-probs of replaced groups move with them."""
    keys = ("trainer.use_vllm=true", "trainer.vllm_gpu_memory_utilization=0.2", "trainer.vllm_max_model_length=128")
    keys += ("round.resample=true", "round.prompts=8", "run.publish=full", "run.validate_every=0")
    arguments = [word for key in keys for word in ("--set", key)]
    run = ("train", "--regime", "grpo", "--model", "tiny:ada", "--task", "arithmetic", "--steps", "2")
    result = cli(*run, "--run-dir", tmp_path / "run", *arguments, timeout=PATIENCE, **ENVIRONMENT)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/policies/ada/metrics.jsonl").read_text().splitlines()]
    directory = RunDirectory(tmp_path / "run")
    shard = Exchange(directory.exchange, "eve", directory.info().run_id).read("ada", 0)
    assert shard is not None
    assert len(shard) == (1 + rows[0]["resample/attempts"]) * 8 * 8 > 64
    assert all(len(trace) == len(ids) for trace, ids in zip(shard.logprobs, shard.token_ids, strict=True))
    for row in rows:
        assert 0.9 < row["sampling/importance_sampling_ratio/mean"] < 1.1
        assert abs(row["ppo_kl"]) < 0.05  # with the log-probs of another row it would be far from 0


@needs_vllm
@pytest.mark.slow
def test_guided_rollouts_continue_a_masked_prefix(cli: Any, tmp_path: Path) -> None:
    """From the second epoch, some rollouts begin with a prefix; the trainer's log-probs of vLLM's continuations are
    close to vLLM's."""
    options = ["--set", "trainer.use_vllm=true", "--set", "trainer.vllm_gpu_memory_utilization=0.2"]
    options += ["--set", "trainer.vllm_max_model_length=128", "--set", "run.validate_every=0", "--steps", "12"]
    run = tmp_path / "run"
    result = cli(
        *("train", "--regime", "guided", "--pool", "tiny", "--run-dir", run, "--json", *options),
        timeout=PATIENCE,
        **ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for policy in ("ada", "bob"):
        file = run / "policies" / policy / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert sum(line["guided/rollouts"] for line in lines) > 0
        for line in lines:
            assert 0.9 < line["sampling/importance_sampling_ratio/mean"] < 1.1


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_with_vllm_resumes_and_leaves_no_process(cli: Any, tmp_path: Path) -> None:
    from runs import Run, members, rolled_back, wait_until

    options = [
        "--steps",
        "4",
        "--set",
        "run.save_every=2",
        "--set",
        "trainer.use_vllm=true",
        "--set",
        "trainer.vllm_gpu_memory_utilization=0.2",
        "--set",
        "trainer.vllm_max_model_length=128",
        "--set",
        "run.validate_every=0",
        "--set",
        "run.validation_limit=4",
    ]
    run = Run(tmp_path, *options, **ENVIRONMENT)
    try:
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        copy = rolled_back(run.path, tmp_path / "copy", {"ada": 2, "bob": 2})
        resumed = Run.__new__(Run)
        resumed.path, resumed.errors = copy, tmp_path / "again.txt"
        resumed.begin("--resume", **ENVIRONMENT)
        wait_until(lambda: len(members(copy)) == 4)
        assert resumed.process.wait(PATIENCE) == 0, resumed.errors.read_text()
        assert [line["step"] for line in resumed.metrics("ada")] == [1, 2, 3, 4]
        assert resumed.weights() == run.weights()
        (tmp_path / "2").mkdir()
        killed = Run(tmp_path / "2", *options, "--steps", "400", **ENVIRONMENT)
        wait_until((killed.path / "policies" / "ada" / "metrics.jsonl").exists)
        children = psutil.Process(killed.process.pid).children(recursive=True)
        killed.process.kill()
        killed.process.wait()
        wait_until(lambda: not any(p.is_running() and p.status() != "zombie" for p in children))
    finally:
        run.end()


def test_policies_on_one_gpu_divide_the_memory_fraction() -> None:
    colocated = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.6}
    assert vllm_keys(colocated, policies_per_gpu=3) == {"vllm_gpu_memory_utilization": pytest.approx(0.2)}
    assert vllm_keys({"use_vllm": True}, policies_per_gpu=1) == {"vllm_gpu_memory_utilization": 0.3}
    assert vllm_keys({}, policies_per_gpu=2) == {}


def test_server_mode_picks_a_free_port_for_weights_by_default() -> None:
    server = {"use_vllm": True, "vllm_mode": "server"}
    ports = {vllm_keys(server, policies_per_gpu=1)["vllm_group_port"] for _ in range(5)}
    assert len(ports) > 1
    assert 51216 not in ports  # TRL's default, the same for every run
    assert vllm_keys({**server, "vllm_group_port": 7000}, policies_per_gpu=1) == {}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_vllm_is_named_with_the_install_command(cli: Any) -> None:
    result = cli("train", "--pool", "tiny", "--set", "trainer.use_vllm=true")
    assert result.returncode == 4
    assert "vllm, for trainer.use_vllm (pip install 'mutualrl[node]'" in result.stderr


def test_engines_on_shared_gpus_start_in_turn_and_report_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's free memory is scripted; the lock is held only while the trainer is built."""
    import fcntl

    from mutualrl.training import vllm_generation

    free = iter([80 * 2**30, 30 * 2**30])
    monkeypatch.setattr(vllm_generation, "_free_memory", lambda: next(free))
    messages: list[str] = []
    lock = tmp_path / "engines.lock"

    def is_held() -> bool:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    with vllm_generation.engine_turn({"use_vllm": True}, lock, shared=True, say=messages.append):
        assert is_held()
    assert not is_held()
    assert messages == ["engine and trainer took 50.0 GiB of the GPU; 30.0 GiB are free"]
    for settings, shared in (
        ({"use_vllm": True}, False),
        ({}, True),
        ({"use_vllm": True, "vllm_mode": "server"}, True),
    ):
        with vllm_generation.engine_turn(settings, lock, shared=shared, say=messages.append):
            assert not is_held()
    assert len(messages) == 1


def test_sleep_mode_reaches_trl(tmp_path: Path) -> None:
    """TRL wakes the engine and puts it to sleep around each generation, including validation."""
    from mutualrl.recipes import Request, resolve

    recipe = resolve(Request(pool="tiny", assignments=("trainer.use_vllm=true", "trainer.vllm_enable_sleep_mode=true")))
    from trl import GRPOConfig

    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **recipe.trainer_settings("ada"))
    assert args.vllm_enable_sleep_mode


@needs_vllm
@pytest.mark.slow
def test_vllm_samples_on_after_replayed_turns(cli: Any, tmp_path: Path) -> None:
    """Prompts of a group differ where turns are replayed: the engine samples each, and what it samples is recorded
    after the given tokens of its own row."""
    problems = get_task("calculator").read("train", TaskSource()).prompts[:8]
    rows = [{"prompt": [{"role": "user", "content": each.text}], "answer": each.answer} for each in problems]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("trainer.use_vllm=true", "trainer.vllm_gpu_memory_utilization=0.2", "trainer.vllm_max_model_length=256")
    keys += ("task.name=dataset", f"task.data={data}", f"task.validation_data={data}", "run.publish=full")
    keys += ("task.tools=mutualrl.tasks.calculator:calculate", "round.prompts=8", "run.validate_every=0")
    keys += ("trainer.per_device_train_batch_size=32",)
    arguments = [word for key in keys for word in ("--set", key)]
    run = ("train", "--regime", "guided", "--pool", "tiny-tools", "--steps", "2", "--run-dir", tmp_path / "run")
    result = cli(*run, *arguments, timeout=PATIENCE, **ENVIRONMENT)
    assert result.returncode == 0, result.stderr[-3000:]
    directory, replayed = RunDirectory(tmp_path / "run"), 0
    exchange = Exchange(directory.exchange, "eve", directory.info().run_id)
    for policy in ("jan", "kim"):
        shard = exchange.read(policy, 1)
        assert shard is not None
        for row in shard:
            messages = row.trajectory.messages
            assert sum(row.mask) == row.length
            if row.prefix:
                replayed += 1
                assert not row.mask[: row.prefix].any()
                assert [message.sampled for message in messages[:2]] == [False, False]
                assert messages[2].sampled
    assert replayed > 0
