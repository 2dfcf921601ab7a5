"""Figures of an evaluation, compared with cases computed by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.evaluation.accuracy import figures, k_values
from mutualrl.evaluation.completion_store import directory_name
from mutualrl.evaluation.generate_rows import chunks
from mutualrl.records import Prompt
from mutualrl.tasks.scoring import pass_at_k, standard_error


def row(prompt: Prompt, reward: float, **fields: Any) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "reward": reward,
        "ended": True,
        "no_box": False,
        "too_long": False,
        "tokens": 3,
        **fields,
    }


PROMPTS = [
    Prompt("a", "x", "1", "Algebra", facets={"level": "1"}),
    Prompt("b", "y", "2", "Algebra", facets={"level": "2"}),
    Prompt("c", "z", "3", "Geometry", facets={"level": "2"}),
]


def test_figures_of_three_greedy_completions() -> None:
    rows = [row(PROMPTS[0], 1.0), row(PROMPTS[1], 0.0, no_box=True, ended=False), row(PROMPTS[2], 1.0)]
    result = figures(PROMPTS, rows, 1)
    assert (result["n"], result["accuracy"]) == (3, pytest.approx(2 / 3))
    assert result["stderr"] == pytest.approx(math.sqrt((2 / 9) / 2))  # variance 1/3 over n - 1, over 3
    assert result["by_group"] == {"Algebra": 0.5, "Geometry": 1.0}
    assert result["facets"]["level"]["2"] == {"n": 2, "accuracy": 0.5, "stderr": 0.5}
    assert (result["no_box"], result["truncated"], result["too_long"]) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        0,
    )
    assert "pass_at_k" not in result


def test_figures_of_four_samples() -> None:
    rows = [
        row(p, r)
        for p, rewards in zip(PROMPTS, ([1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]), strict=True)
        for r in map(float, rewards)
    ]
    result = figures(PROMPTS, rows, 4)
    assert result["accuracy"] == pytest.approx((1 / 4 + 0 + 3 / 4) / 3)
    assert result["pass_at_k"] == {
        "1": pytest.approx(1 / 3),
        "2": pytest.approx((1 / 2 + 0 + 1) / 3),
        "4": pytest.approx(2 / 3),
    }


def test_completions_in_another_order_are_rejected() -> None:
    with pytest.raises(ValueError, match="order of their prompts"):
        figures(PROMPTS, [row(p, 1.0) for p in PROMPTS[::-1]], 1)
    with pytest.raises(ValueError, match="2 completions for 3 prompts"):
        figures(PROMPTS, [row(p, 1.0) for p in PROMPTS[:2]], 1)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_fraction_of_k_subsets_with_a_success(samples: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations([1] * hits + [0] * (samples - hits), k))
    assert pass_at_k(samples, hits, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_rejects_k_above_the_number_of_samples() -> None:
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


def test_standard_error_of_one_value_is_undefined() -> None:
    assert standard_error([1.0]) is None
    assert standard_error([1.0, 1.0]) == 0


def test_reported_ks() -> None:
    assert [k_values(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(st.lists(st.integers(1, 60), max_size=80), st.integers(1, 64), st.integers(1, 40), st.integers(1, 20))
def test_chunks_contain_every_prompt_once_and_fit_the_context(
    lengths: list[int], context: int, new: int, size: int
) -> None:
    pieces = chunks(lengths, context, new, size)
    assert sorted(position for piece in pieces for position in piece.places) == list(range(len(lengths)))
    for piece in pieces:
        assert 1 <= len(piece.places) <= size
        for position in piece.places:
            assert piece.new_tokens == max(0, min(new, context - lengths[position]))


def test_no_two_models_share_a_folder() -> None:
    names = ["ada", "a/b", "a-b", "../x", "x", "ü", "a b", "A" * 200, "A" * 201, "."]
    folders = [directory_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(folder not in ("", ".", "..") and "/" not in folder for folder in folders)
