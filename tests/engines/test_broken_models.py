"""Broken models are rejected by name before their output is used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mutualrl.engines import Sampling
from mutualrl.engines.model_files import check_model_files
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
        check_model_files(model)


def test_pipe_in_a_model_directory_is_rejected_without_blocking(model: Path) -> None:
    os.mkfifo(model / "tokenizer_extra.json")
    with pytest.raises(ModelError, match=r"tokenizer_extra\.json: not a regular file"):
        load_tokenizer(str(model))
    with pytest.raises(ModelError, match=r"tokenizer_extra\.json: not a regular file"):
        check_model_files(model)


def test_non_finite_weights_are_rejected(model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"weight '{name}' is not finite"):
        check_model_files(model)


def test_failing_chat_template_is_rejected(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    engine.tokenizer.chat_template = "{{ raise_exception('no user turns') }}"
    with pytest.raises(ModelError, match=r"the chat template of .* failed: TemplateError: no user turns"):
        prompt_ids(["2+2:"], engine.tokenizer)
    with pytest.raises(ModelError):
        engine.generate(["2+2:"], Sampling(max_new_tokens=2))
