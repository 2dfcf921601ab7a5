"""Log-probs of given tokens, compared with the model's output computed one row at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mutualrl.engines import scoring
from mutualrl.engines.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def engine(tiny: dict[str, Path]) -> TransformersEngine:
    return TransformersEngine.load(str(tiny["ada"]))


def reference(engine: TransformersEngine, prompt: list[int], completion: list[int]) -> list[float]:
    ids = [*prompt, *completion]
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([ids], device=engine.model.device)).logits[0].double().cpu()
    scores = torch.log_softmax(logits, dim=-1)
    return [scores[position - 1, ids[position]].item() for position in range(len(prompt), len(ids))]


ROWS = [([5, 6, 7], [8, 9]), ([4], [30, 31, 32, 33, 34, 35]), ([9] * 20, []), ([7, 7], [8])]


def test_rows_of_all_lengths_score_the_same_in_a_batch(engine: TransformersEngine) -> None:
    progress: list[int] = []
    result = scoring.completion_logprobs(engine.model, [p for p, _ in ROWS], [c for _, c in ROWS], progress.append)
    for (prompt, completion), values in zip(ROWS, result, strict=True):
        assert values.dtype == np.float64
        assert values.tolist() == pytest.approx(reference(engine, prompt, completion), abs=1e-4)
    assert sum(progress) == len(ROWS)


def test_row_scored_in_chunks_scores_the_same(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are held for 16 positions at a time here; the chunks share the KV cache."""
    rows = [([3] * 5, list(range(10, 90))), ([4], list(range(40, 100, 2)))]
    prompts, completions = [p for p, _ in rows], [c for _, c in rows]
    at_once = scoring.completion_logprobs(engine.model, prompts, completions)
    monkeypatch.setattr(scoring, "_LOGITS", 1)
    in_chunks = scoring.completion_logprobs(engine.model, prompts, completions)
    for a, b in zip(at_once, in_chunks, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_text_longer_than_the_context_is_scored_in_windows(engine: TransformersEngine) -> None:
    size = scoring.context_length(engine.model) - 1
    ids = [10 + i % 50 for i in range(size + 7)]
    (values,) = scoring.text_logprobs(engine.model, 1, [ids])
    assert len(values) == len(ids)
    assert values[:size].tolist() == pytest.approx(reference(engine, [1], ids[:size]), abs=1e-4)
    assert values[size:].tolist() == pytest.approx(reference(engine, [1], ids[size:]), abs=1e-4)
    assert scoring.text_logprobs(engine.model, 1, [[], [5]])[0].tolist() == []


def test_row_that_does_not_fit_is_rejected(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="row 1: found 1 prompt and 300 completion tokens"):
        scoring.completion_logprobs(engine.model, [[1], [1]], [[2], [2] * 300])
    with pytest.raises(ValueError, match="row 0: found 0 prompt and 1 completion tokens"):
        scoring.completion_logprobs(engine.model, [[]], [[2]])
