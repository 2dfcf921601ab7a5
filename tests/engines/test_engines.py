from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.engines import Sampling
from mutualrl.engines.transformers_engine import TransformersEngine, load_tokenizer
from mutualrl.errors import ModelError
from mutualrl.tasks import TaskSource, get_task

PROMPTS = [p.text for p in get_task("arithmetic").read("validation", TaskSource()).prompts[:10]]


def test_greedy_answers_do_not_depend_on_the_batch(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["bob"]))
    sampling = Sampling(max_new_tokens=20)
    together = engine.generate(PROMPTS, sampling)
    engine.batch_size = 3
    assert engine.generate(PROMPTS, sampling) == together
    assert [engine.generate([p], sampling)[0] for p in PROMPTS] == together


def test_a_model_s_generation_defaults_do_not_change_greedy_decoding(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["ada"]))
    plain = engine.generate(PROMPTS, Sampling(20))
    engine.model.generation_config.repetition_penalty = 5.0
    assert engine.generate(PROMPTS, Sampling(20)) == plain
    assert engine.model.generation_config.repetition_penalty == 5.0


def test_sampling_follows_its_seed(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["ada"]))
    once = engine.generate(PROMPTS, Sampling(20, temperature=1.5, samples=4, seed=1))
    assert [len(group) for group in once] == [4] * len(PROMPTS)
    assert once == engine.generate(PROMPTS, Sampling(20, temperature=1.5, samples=4, seed=1))
    assert once != engine.generate(PROMPTS, Sampling(20, temperature=1.5, samples=4, seed=2))


def test_a_completion_says_whether_it_ended(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["ada"]))
    eos = engine.tokenizer.eos_token_id
    for group in engine.generate(PROMPTS, Sampling(20)):
        assert group[0].ended == (group[0].token_ids[-1] == eos)
        assert eos not in group[0].token_ids[:-1]
    assert not any(group[0].ended for group in engine.generate(PROMPTS, Sampling(2)))


def test_a_model_that_is_not_there_is_an_error_of_the_environment(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
