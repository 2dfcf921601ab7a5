from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.engines import Sampling
from mutualrl.engines.transformers_engine import TransformersEngine, load_tokenizer
from mutualrl.errors import ModelError
from mutualrl.tasks import TaskSource, get_task

PROMPTS = [p.text for p in get_task("arithmetic").read("validation", TaskSource()).prompts[:10]]


def test_greedy_completions_do_not_depend_on_the_batch_size(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["bob"]))
    sampling = Sampling(max_new_tokens=20)
    batched = engine.generate(PROMPTS, sampling)
    engine.batch_size = 3
    assert engine.generate(PROMPTS, sampling) == batched
    assert [engine.generate([p], sampling)[0] for p in PROMPTS] == batched


def test_generation_defaults_of_a_model_do_not_change_greedy_decoding(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["ada"]))
    plain = engine.generate(PROMPTS, Sampling(20))
    engine.model.generation_config.repetition_penalty = 5.0
    assert engine.generate(PROMPTS, Sampling(20)) == plain
    assert engine.model.generation_config.repetition_penalty == 5.0


def test_sampling_is_determined_by_its_seed(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["ada"]))
    first = engine.generate(PROMPTS, Sampling(20, temperature=1.5, samples=4, seed=1))
    assert [len(group) for group in first] == [4] * len(PROMPTS)
    assert first == engine.generate(PROMPTS, Sampling(20, temperature=1.5, samples=4, seed=1))
    assert first != engine.generate(PROMPTS, Sampling(20, temperature=1.5, samples=4, seed=2))


def test_completion_records_whether_it_ended(tiny: dict[str, Path]) -> None:
    engine = TransformersEngine.load(str(tiny["ada"]))
    eos = engine.tokenizer.eos_token_id
    for group in engine.generate(PROMPTS, Sampling(20)):
        assert group[0].ended == (group[0].token_ids[-1] == eos)
        assert eos not in group[0].token_ids[:-1]
    assert not any(group[0].ended for group in engine.generate(PROMPTS, Sampling(2)))


def test_missing_model_raises_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
