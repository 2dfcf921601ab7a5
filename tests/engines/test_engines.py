from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.engines import Completion, Sampling
from mutualrl.engines.replay import ReplayEngine, record
from mutualrl.engines.transformers_engine import TransformersEngine, load_tokenizer
from mutualrl.errors import DataError, ModelError
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


def test_recorded_completions_are_replayed_in_order(tmp_path: Path) -> None:
    answers = [[Completion((1, 2), " a\u2028b", True), Completion((3,), "c", False)], [Completion((), "", False)]]
    record(tmp_path / "r.jsonl", ["p", "q"], answers)
    engine = ReplayEngine.load(tmp_path / "r.jsonl")
    assert engine.generate(["p", "q"], Sampling(5)) == [[answers[0][0]], [answers[1][0]]]
    assert engine.generate(["p"], Sampling(5)) == [[answers[0][1]]]
    with pytest.raises(DataError, match="2 completions were recorded"):
        engine.generate(["p"], Sampling(5))
    with pytest.raises(DataError, match="0 completions were recorded"):
        engine.generate(["other"], Sampling(5))


@pytest.mark.parametrize("row", ['{"prompt": "p"}', '{"prompt": "p", "token_ids": ["x"], "text": "t", "ended": true}'])
def test_a_recorded_row_that_does_not_fit_is_named(tmp_path: Path, row: str) -> None:
    (tmp_path / "r.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match="row 1: expected 'token_ids'"):
        ReplayEngine.load(tmp_path / "r.jsonl")


def test_a_model_that_is_not_there_is_an_error_of_the_environment(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_making_an_embedded_model_leaves_standard_output_to_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mutualrl.tiny import cache

    monkeypatch.setenv("MUTUALRL_CACHE", str(tmp_path))
    monkeypatch.setattr("mutualrl.tiny.warmup.make", lambda name, path, on_progress: print("a library's own words"))
    assert cache.ensure("ada").is_dir()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "a library's own words\n")
