"""Broken models are rejected by name before their output is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mutualrl.engines import Sampling
from mutualrl.engines.generation_defaults import neutralize
from mutualrl.engines.model_files import check_model
from mutualrl.engines.scoring import completion_logprobs, context_length
from mutualrl.engines.transformers_engine import TransformersEngine, load_tokenizer
from mutualrl.errors import ModelError
from mutualrl.tasks.prompting import prompt_ids


@pytest.fixture
def model(tiny: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny["ada"], tmp_path / "model"))


def rewrite(model: Path, change: object) -> None:
    (file,) = model.glob("*.safetensors")
    weights = load_file(file)
    change(weights)  # type: ignore[operator]
    save_file(weights, file, metadata={"format": "pt"})


def test_missing_weights_are_not_initialized_at_random(model: Path) -> None:
    rewrite(model, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, such as 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        TransformersEngine.load(str(model))


def test_non_finite_logprobs_are_rejected(model: Path) -> None:
    rewrite(model, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    engine = TransformersEngine.load(str(model))
    with pytest.raises(ModelError, match="returned non-finite log-probs"):
        completion_logprobs(engine.model, [[1]], [[2]])


def test_token_without_an_embedding_is_rejected(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    with pytest.raises(ModelError, match=r"token id 100000 has no embedding in model .*ada|model"):
        completion_logprobs(engine.model, [[1]], [[100_000]])


def test_context_length_of_one_is_rejected(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    engine.model.config.max_position_embeddings = 1
    with pytest.raises(ModelError, match="max_position_embeddings 1 in its config, expected 2 or more"):
        context_length(engine.model)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "exceeded 0.5 s"),
        ("{{ 'x' * 3000000000 }}", "needed over 2,147,483,648 bytes"),
        ("{{ 'x' * 20000000 }}", "produced 20,000,000 characters"),
        ("{% for i in range(1000000000) %}{% endfor %}", "failed: OverflowError"),
        ("{{ messages[7].content }}", "failed: UndefinedError"),
        ("{{ messages", "failed: TemplateSyntaxError"),
    ],
)
def test_chat_template_that_loops_or_allocates_is_rejected(
    model: Path, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mutualrl.tasks.prompting.TEMPLATE_SECONDS", 0.5)
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="the chat template of .* " + message):
        prompt_ids(["2+2:"], tokenizer)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("config.json", "eos_token_id", "</s>", "eos_token_id: found '</s>', expected a token id below"),
        ("config.json", "eos_token_id", [2, 10**9], "eos_token_id: found .2, 1000000000., expected a token id below"),
        ("config.json", "eos_token_id", -5, "eos_token_id: found -5"),
        ("config.json", "pad_token_id", 2.5, "pad_token_id: found 2.5"),
        ("generation_config.json", "eos_token_id", {"a": 1}, "generation_config.json: eos_token_id: found"),
        ("generation_config.json", "bos_token_id", True, "bos_token_id: found True"),
    ],
)
def test_invalid_token_id_is_rejected_before_the_model_is_loaded(
    model: Path, file: str, key: str, value: object, message: str
) -> None:
    path = model / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=message):
        check_model(str(model))


def test_pipe_in_a_model_directory_is_rejected_without_blocking(model: Path) -> None:
    os.mkfifo(model / "tokenizer_extra.json")
    with pytest.raises(ModelError, match=r"tokenizer_extra\.json: not a regular file"):
        load_tokenizer(str(model))
    with pytest.raises(ModelError, match=r"tokenizer_extra\.json: not a regular file"):
        check_model(str(model))


def test_non_finite_weights_are_rejected(model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"weight '{name}' is not finite"):
        check_model(str(model))


def test_renamed_weights_are_named(model: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "norm" in name]:
            weights[f"module.{name}"] = weights.pop(name)

    rewrite(model, rename)
    with pytest.raises(ModelError, match=r"lacks 9 of its weights.*it has 9 others, such as 'module\.model"):
        check_model(str(model))


def test_weights_of_another_shape_are_named(model: Path) -> None:
    rewrite(model, lambda weights: weights.update({"lm_head.weight": torch.zeros(3, 64)}))
    with pytest.raises(ModelError, match=r"1 of its weights, such as 'lm_head.weight', have another shape"):
        check_model(str(model))


def test_adapter_is_called_one_and_the_printed_command_merges_it(model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from mutualrl.engines.model_files import known_model

    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="is a LoRA adapter") as refused:
        known_model(str(tmp_path / "adapter"))
    command = str(refused.value).partition("use the result: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True, env=with_this_python())
    check_model(str(tmp_path / "merged"))
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", model)
    with pytest.raises(ModelError, match=r"has adapter_config\.json beside a model's weights"):
        check_model(str(model))


def with_this_python() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    "key", ["repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "forced_eos_token_id"]
)
def test_own_generation_settings_stay_out_of_rollouts_and_in_the_saved_model(model: Path, key: str) -> None:
    value = {"repetition_penalty": 1.7, "suppress_tokens": [5]}.get(key, 1)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value, "eos_token_id": [1, 2]}))
    loaded = TransformersEngine.load(str(model)).model
    declared = neutralize(loaded)
    assert getattr(declared, key) == value
    assert not getattr(loaded.generation_config, key, None)
    assert loaded.generation_config.eos_token_id == [1, 2]


def test_generation_settings_that_cannot_be_saved_are_reduced(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_sample": False, "temperature": 0.6}))
    loaded = TransformersEngine.load(str(model)).model
    saved = neutralize(loaded)
    saved.save_pretrained(model)
    assert json.loads(path.read_text())["eos_token_id"] == 1
    assert "generation_config.json cannot be saved again" in capsys.readouterr().err


def test_failing_chat_template_is_rejected(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    engine.tokenizer.chat_template = "{{ raise_exception('no user turns') }}"
    with pytest.raises(ModelError, match=r"the chat template of .* failed: TemplateError: no user turns"):
        prompt_ids(["2+2:"], engine.tokenizer)
    with pytest.raises(ModelError):
        engine.generate(["2+2:"], Sampling(max_new_tokens=2))
