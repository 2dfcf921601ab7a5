"""Coarse bounds on what an alignment costs; `benchmarks/thl_speed.py` has the figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mutualrl.thl import align_logprobs
from mutualrl.thl.table import table_of
from thl_tokenizers import byte_bpe, real, sentencepiece_like


def fastest(work: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def test_an_alignment_costs_a_part_of_encoding_the_text(real_data: Path) -> None:
    source, target = real("qwen3"), real("llama3")
    lines = (real_data / "math" / "math500.jsonl").read_text().splitlines()[:100]
    texts = [json.loads(line)["solution"] for line in lines]
    ids = [source.encode(text) for text in texts]
    target_ids = [target.encode(text, add_special_tokens=False) for text in texts]
    traces = [[-1.0] * len(row) for row in ids]
    encode = fastest(lambda: [t.encode(text) for t in (source, target) for text in texts])
    rows = list(zip(texts, ids, traces, target_ids, strict=True))
    given = fastest(lambda: [align_logprobs(t, i, p, source, target, target_ids=j) for t, i, p, j in rows])
    whole = fastest(lambda: [align_logprobs(t, i, p, source, target) for t, i, p, _ in rows])
    assert given < 0.5 * encode  # 0.24 measured
    assert whole < 1.2 * encode  # 0.72 measured


def test_a_table_of_two_hundred_thousand_tokens_is_small_and_made_at_once(real_data: Path) -> None:
    tokenizer = real("phi4-mini-style")
    began = time.perf_counter()
    table = table_of(tokenizer)
    assert time.perf_counter() - began < 2.0
    size = sys.getsizeof(table.pieces) + sum(map(sys.getsizeof, table.pieces))
    assert len(table.pieces) == 200_023
    assert size + table.lengths.nbytes + table.control.nbytes + table.byte_tokens.nbytes < 50e6


def test_time_is_linear_in_the_length() -> None:
    source, target = byte_bpe("a·b"), byte_bpe("b·a")
    times = []
    for tokens in (4000, 32000):
        text = "abc " * (tokens // 4)
        ids = source.encode(text)
        target_ids = target.encode(text)
        trace = [-1.0] * len(ids)
        times.append(fastest(lambda: align_logprobs(text, ids, trace, source, target, target_ids=target_ids)))  # noqa: B023
    assert times[1] < 8 * 3 * times[0]
    assert times[1] < 1.0


@pytest.mark.parametrize("text", ["MANY Words In Capitals, " * 1000, "A" + " the" * 8000 + " B" + " the" * 8000 + "C"])
def test_a_tokenizer_that_changes_text_does_not_take_for_ever(text: str) -> None:
    source, target = byte_bpe(), sentencepiece_like("Lowercase")
    ids = source.encode(text)
    began = time.perf_counter()
    aligned = align_logprobs(text, ids, [-1.0] * len(ids), source, target)
    assert time.perf_counter() - began < 5.0
    assert not aligned.exact
    if " the" in text:
        assert aligned.covered.mean() > 0.99
