"""Models that are not whole are refused by name, before their numbers are believed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mutualrl.engines import Sampling
from mutualrl.engines.scoring import completion_logprobs, context_length
from mutualrl.engines.transformers_engine import TransformersEngine
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


def test_missing_weights_are_not_drawn_at_random(model: Path) -> None:
    rewrite(model, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, such as 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        TransformersEngine.load(str(model))


def test_weights_that_are_no_numbers(model: Path) -> None:
    rewrite(model, lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    engine = TransformersEngine.load(str(model))
    with pytest.raises(ModelError, match="returned non-finite log-probs"):
        completion_logprobs(engine.model, [[1]], [[2]])


def test_a_token_without_an_embedding(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    with pytest.raises(ModelError, match=r"token id 100000 has no embedding in model .*ada|model"):
        completion_logprobs(engine.model, [[1]], [[100_000]])


def test_a_context_of_one(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    engine.model.config.max_position_embeddings = 1
    with pytest.raises(ModelError, match="max_position_embeddings 1 in its config, expected 2 or more"):
        context_length(engine.model)


def test_a_chat_template_that_fails(model: Path) -> None:
    engine = TransformersEngine.load(str(model))
    engine.tokenizer.chat_template = "{{ raise_exception('no user turns') }}"
    with pytest.raises(ModelError, match=r"the chat template of .* failed on a prompt: no user turns"):
        prompt_ids(["2+2:"], engine.tokenizer)
    with pytest.raises(ModelError):
        engine.generate(["2+2:"], Sampling(max_new_tokens=2))
