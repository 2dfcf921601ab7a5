"""Work and memory of an alignment, as counts; `benchmarks/thl_speed.py` measures seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conftest import lines_run
from mutualrl.thl import align_logprobs
from mutualrl.thl.table import table_of
from thl_tokenizers import byte_bpe, real, sentencepiece_like


def test_table_of_200k_tokens_is_small(real_data: Path) -> None:
    table = table_of(real("phi4-mini-style"))
    size = sys.getsizeof(table.pieces) + sum(map(sys.getsizeof, table.pieces))
    assert len(table.pieces) == 200_023
    assert size + table.lengths.nbytes + table.control.nbytes + table.byte_tokens.nbytes < 50e6


def test_alignment_runs_no_line_of_python_per_token() -> None:
    source, target = byte_bpe("a·b"), byte_bpe("b·a")
    counts = []
    for tokens in (400, 4000, 40000):
        text = "abc " * (tokens // 4)
        ids = source.encode(text)
        target_ids = target.encode(text)
        trace = [-1.0] * len(ids)
        counts.append(
            lines_run(
                lambda t=text, i=ids, p=trace, j=target_ids: align_logprobs(t, i, p, source, target, target_ids=j)
            )
        )
    assert counts[2] <= counts[0] + 500  # for 100 times the tokens


@pytest.mark.parametrize("text", ["MANY Words In Capitals, ", " the"])
def test_work_is_linear_for_a_tokenizer_that_changes_text(text: str) -> None:
    source, target = byte_bpe(), sentencepiece_like("Lowercase")
    counts = []
    for repeats in (800, 1600, 3200):
        full_text = f"A{text * repeats} B{text * repeats}C"
        ids = source.encode(full_text)
        counts.append(lines_run(lambda t=full_text, i=ids: align_logprobs(t, i, [-1.0] * len(i), source, target)))
    assert counts[2] - counts[1] <= 2.5 * (counts[1] - counts[0]) + 1000


@pytest.mark.parametrize("text", ["MANY Words In Capitals, " * 1000, "A" + " the" * 8000 + " B" + " the" * 8000 + "C"])
def test_long_text_that_the_tokenizer_changes_is_aligned(text: str) -> None:
    source, target = byte_bpe(), sentencepiece_like("Lowercase")
    ids = source.encode(text)
    aligned = align_logprobs(text, ids, [-1.0] * len(ids), source, target)
    assert not aligned.exact
    if " the" in text:
        assert aligned.covered.mean() > 0.99
