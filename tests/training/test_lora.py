"""Policies that train adapters."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from conftest import PATIENCE, Cli, needs_zero
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.storage.files import read_checksummed
from training_harness import STEPS, ReplayedMutual, publish_rollouts, sampled_rounds, sharing, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("regime", "settings"), [("sgt", {}), ("prp", {}), ("prp", {"denominator": "snapshot"})])
def test_only_the_adapter_trains_and_the_reference_is_the_base_model(
    tiny: dict[str, Path], tmp_path: Path, regime: str, settings: dict[str, Any]
) -> None:
    bob = load_tokenizer(str(tiny["bob"]))
    publish_rollouts(tmp_path / "x", bob, sampled_rounds(8, STEPS))
    learner = train(
        ReplayedMutual,
        tiny["ada"],
        tmp_path / "a",
        sharing(tmp_path / "x", regime, tokenizers={"bob": bob}, **settings),
        peft_config=LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.1 if regime == "sgt" else 0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        beta=0.1,
    )
    assert learner.ref_model is None
    assert learner.kept[0]["kl"] == pytest.approx(0.0, abs=1e-6)  # a new adapter changes nothing
    assert learner.kept[-1]["kl"] > 1e-6
    start = load_file(tiny["ada"] / "model.safetensors")
    for name, tensor in learner.model.get_base_model().state_dict().items():
        base_name = name.replace(".base_layer", "")
        if base_name in start:
            assert torch.equal(tensor, start[base_name]), name


@pytest.mark.release
@pytest.mark.parametrize("strategy", [pytest.param("zero3", marks=needs_zero), "fsdp2"])
def test_policies_on_several_processes_train_adapters_from_the_command_line(
    cli: Any, tmp_path: Path, tiny: dict[str, Path], request: pytest.FixtureRequest, strategy: str
) -> None:
    """Under ZeRO-3 and FSDP2, with models of one's own, whose weights are checked before they are loaded; adapters
    under DDP are trained and resumed in tests/faults/test_resume.py."""
    if strategy == "zero3":
        request.getfixturevalue("zero_ready")
    processes = 2
    own = []
    for policy in ("ada", "bob"):
        shutil.copytree(tiny[policy], tmp_path / "models" / policy)
        own += ["--set", f"policies.{policy}.model={tmp_path / 'models' / policy}"]
    result = cli(
        "train",
        "--regime",
        "sgt",
        "--pool",
        "tiny",
        "--steps",
        "3",
        "--run-dir",
        tmp_path / "run",
        "--json",
        "--set",
        "lora.r=4",
        "--set",
        "lora.alpha=64",
        "--set",
        "trainer.learning_rate=5e-3",
        "--set",
        f"launch.strategy={strategy}",
        "--set",
        f"launch.processes={processes}",
        "--set",
        f"trainer.per_device_train_batch_size={128 // processes}",
        *own,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    expected = json.loads(result.stdout)["policies"]
    assert {policy: policy_summary["steps"] for policy, policy_summary in expected.items()} == {"ada": 3, "bob": 3}
    assert f"{2 * processes} processes share" in result.stderr
    assert all(policy_summary["rescued_pairs"] > 0 for policy_summary in expected.values())
    for policy in ("ada", "bob"):
        files = tmp_path / "run" / "policies" / policy
        marker = read_checksummed(tmp_path / "run" / "exchange" / policy / "000000.json")
        assert marker is not None
        assert [part["rows"] for part in marker["parts"]] == [128 // processes] * processes
        lines = (files / "rescues.jsonl").read_text().splitlines()
        assert len(lines) == expected[policy]["rescued_pairs"]
        for line in map(json.loads, lines):  # completions of all ranks
            assert [answer["reward"] for answer in line["own"]] == [0.0] * 4
            assert line["prompt"].endswith(":")
        log = (files / "logs" / "attempt-0.log").read_text()
        assert ("DeepSpeed" in log) == (strategy == "zero3")
        assert (files / "adapter" / "adapter_model.safetensors").is_file()
        merged, start = (load_file(d / "model.safetensors") for d in (files / "model", tiny[policy]))
        changed = {name for name in start if not torch.equal(start[name], merged[name])}
        assert changed
        assert all("proj" in name for name in changed)
    evaluated = cli("eval", "--run", tmp_path / "run", "--json")
    assert evaluated.returncode == 0, evaluated.stderr[-2000:]
    for policy, policy_summary in json.loads(evaluated.stdout)["models"].items():
        assert policy_summary["accuracy"] == pytest.approx(expected[policy]["validation"]["accuracy"], abs=0.05)


QUANTIZED = "trainer.model_init_kwargs={quantization_config: {load_in_4bit: true}}"


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ((QUANTIZED,), 2, "quantized weights are not trained; expected an adapter (lora: {r: 16})"),
        (("trainer.model_init_kwargs={load_in_4bit: true}",), 2, "expected quantization_config: {load_in_4bit: true}"),
        ((QUANTIZED, "lora.r=4"), 4, "bitsandbytes, for trainer.model_init_kwargs.quantization_config (pip install"),
    ],
)
def test_four_bits_that_cannot_train_are_refused_by_name(
    cli_here: Cli, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.setattr("mutualrl.machine.requirements.find_spec", lambda name: None)
    chosen = [word for setting in settings for word in ("--set", setting)]
    result = cli_here("train", "--regime", "sgt", "--pool", "tiny", "--run-dir", "r", *chosen)
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr


@pytest.mark.extended
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_adapter_trains_on_weights_of_four_bits_and_is_merged_in_full_precision(
    cli: Cli, tmp_path: Path, tiny: dict[str, Path]
) -> None:
    short = ("--steps", "1", "--set", "run.validation_limit=4", "--no-report", "--run-dir", "r")
    result = cli("train", "--regime", "sgt", "--pool", "tiny", *short, "--set", QUANTIZED, "--set", "lora.r=4")
    assert result.returncode == 0, result.stderr
    for policy in ("ada", "bob"):
        files = tmp_path / "r" / "policies" / policy
        assert (files / "adapter" / "adapter_model.safetensors").is_file()
        merged, start = (load_file(d / "model.safetensors") for d in (files / "model", tiny[policy]))
        assert {name: (t.shape, t.dtype) for name, t in merged.items()} == {
            name: (t.shape, t.dtype) for name, t in start.items()
        }
        assert any(not torch.equal(start[name], merged[name]) for name in start)
