"""Anchor `paper` compared with an independent transcription of the paper's three algorithms."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import TEXTS, any_text

from mutualrl.thl import align_logprobs, decode_completion, retokenize, word_spans
from thl_tokenizers import ALL, any_tokenizer, byte_bpe, real

IGNORE = "ignored"


def transcribed_word_spans(text: str) -> list[tuple[int, int]]:
    spans = []
    for match in re.finditer(r"\S+", text):
        spans.append((match.start(), match.end()))
    return spans


def transcribed_word_map(text: str, tok: Any) -> tuple[list[int], list[int | None]]:
    def tokenize(part: str) -> list[int]:
        return tok.encode(part, add_special_tokens=False)

    full_ids = tokenize(text)
    spans = transcribed_word_spans(text)
    word_map: list[int | None] = []
    built_ids: list[int] = []
    prev_end = 0
    for w_idx, (start, end) in enumerate(spans):
        seg = text[prev_end:end]
        seg_ids = tokenize(seg)
        built_ids.extend(seg_ids)
        if prev_end == 0 and start > 0:
            lead = text[:start]
            n_lead = len(tokenize(lead))
            word_map.extend([None] * n_lead)
            word_map.extend([w_idx] * (len(seg_ids) - n_lead))
        else:
            word_map.extend([w_idx] * len(seg_ids))
        prev_end = end
    if len(built_ids) != len(full_ids):
        length = min(len(built_ids), len(full_ids))
        built_ids, word_map, full_ids = built_ids[:length], word_map[:length], full_ids[:length]
    return full_ids, word_map


def transcribed_align(text: str, log_probs: list[float], target_length: int, source: Any, target: Any) -> list[Any]:
    out: list[Any] = [IGNORE] * target_length
    src_ids, src_word_map = transcribed_word_map(text, source)
    tgt_ids, tgt_word_map = transcribed_word_map(text, target)
    src_idx, tgt_idx = list(range(len(log_probs))), list(range(target_length))
    l_src, l_tgt = min(len(src_idx), len(src_ids)), min(len(tgt_idx), len(tgt_ids))
    per_word_sum: dict[int, float] = {}
    for p in range(l_src):
        wid = src_word_map[p]
        if wid is None:
            continue
        per_word_sum[wid] = per_word_sum.get(wid, 0) + log_probs[src_idx[p]]
    if not per_word_sum:
        return out
    per_word_count: dict[int, int] = {}
    for p in range(l_tgt):
        wid = tgt_word_map[p]
        if wid is None:
            continue
        per_word_count[wid] = per_word_count.get(wid, 0) + 1
    for p in range(l_tgt):
        wid = tgt_word_map[p]
        if wid is None:
            continue
        cnt = per_word_count.get(wid, 0)
        if cnt <= 0:
            continue
        out[tgt_idx[p]] = per_word_sum.get(wid, 0) / cnt
    return out


def assert_equal(text: str, source: Any, target: Any, rng: random.Random, ended: bool) -> int:
    ids = list(retokenize(text, source, ended=ended).ids)
    text = decode_completion(ids, source)
    logprobs = [-rng.expovariate(1.0) for _ in ids]
    aligned = align_logprobs(text, ids, logprobs, source, target, anchor="paper")
    expected = transcribed_align(text, logprobs, len(aligned.target_ids), source, target)
    results = [IGNORE if math.isnan(value) else value for value in aligned.logprobs.tolist()]
    assert results == expected  # bit for bit
    return sum(value != IGNORE for value in results)


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ALL)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(text=any_text, seed=st.integers(0, 99), ended=st.booleans())
def test_anchor_paper_equals_the_papers_algorithm_bit_for_bit(
    source: str, target: str, text: str, seed: int, ended: bool
) -> None:
    assert_equal(text, any_tokenizer(source), any_tokenizer(target), random.Random(seed), ended)


def test_anchor_paper_equals_the_papers_algorithm_on_math_solutions(real_data: Path) -> None:
    lines = (real_data / "math" / "math500.jsonl").read_text().splitlines()[:40]
    rng = random.Random(0)
    for line in lines:
        assert assert_equal(json.loads(line)["solution"], real("qwen3"), real("llama3"), rng, True) > 10


def test_word_spans_equal_the_papers() -> None:
    for text in TEXTS:
        assert word_spans(text, "word") == transcribed_word_spans(text)
    assert word_spans(" ab  c\n") == [(1, 3), (5, 6)]
    assert word_spans("a 日本") == [(0, 1), (2, 3), (3, 4)]  # one CJK character switches the whole text
    assert word_spans("a 日本", "word") == [(0, 1), (2, 4)]
    assert word_spans("ab c", "char") == [(0, 1), (1, 2), (3, 4)]
    with pytest.raises(ValueError, match="expected one of: auto, word, char"):
        word_spans("a", "line")  # type: ignore[arg-type]


def test_papers_map_drifts_where_span_does_not() -> None:
    r"""In `a.\nb`, `.\n` is one token of the full text but two across words, so the map is off by one after it."""
    source, target = byte_bpe(".·Ċ"), byte_bpe()
    ids = retokenize("a.\nb c", source).ids
    assert len(ids) == 5  # a | .\n | b | space | c
    logprobs = [-1.0, -2.0, -4.0, -8.0, -16.0]
    paper = align_logprobs("a.\nb c", ids, logprobs, source, target, anchor="paper")
    # the paper's segments "a." "\nb" " c" have 2 tokens each; cut to five, the words are 0 0 1 1 2 for a .\n b space c
    assert paper.logprobs.tolist() == [-1.5, -1.5, -6.0, -6.0, -8.0, -8.0]
    span = align_logprobs("a.\nb c", ids, logprobs, source, target, anchor="span")
    assert span.logprobs.tolist() == [-1.0, -1.0, -1.0, -4.0, -8.0, -16.0]


def test_papers_map_excludes_outer_whitespace_and_eos() -> None:
    """The mass of leading and trailing whitespace and of EOS is in the residual."""
    tokenizer = byte_bpe()
    eos = tokenizer.eos_token_id
    ids = [*retokenize(" ab ", tokenizer).ids, eos]
    aligned = align_logprobs(" ab ", ids, [-1.0, -2.0, -4.0, -8.0, -16.0], tokenizer, tokenizer, anchor="paper")
    assert aligned.covered.tolist() == [False, True, True, False, False]
    assert aligned.logprobs[1:3].tolist() == [-3.0, -3.0]
    assert aligned.residual == -25.0
    assert aligned.mismatched == 3


def test_paper_fallback_is_word_where_a_token_straddles_and_paper_elsewhere() -> None:
    tokenizer = byte_bpe(".·Ċ")  # `.\n` is one token, across two words
    for text, straddles in (("a b c", False), ("a.\nb c", True)):
        ids = list(retokenize(text, tokenizer).ids)
        built = [token for part in re.findall(r"\s*\S+", text) for token in tokenizer.encode(part)]
        assert (built != ids) == straddles  # the premise, computed without the package
        logprobs = [-1.5 - n for n in range(len(ids))]
        aligned = {
            anchor: align_logprobs(text, ids, logprobs, tokenizer, tokenizer, anchor=anchor)  # type: ignore[arg-type]
            for anchor in ("paper", "paper-fallback", "word")
        }
        expected = "word" if straddles else "paper"
        assert aligned["paper-fallback"].logprobs.tolist() == aligned[expected].logprobs.tolist()
        assert aligned["paper-fallback"].anchor == "paper-fallback"
    assert aligned["paper"].logprobs.tolist() != aligned["word"].logprobs.tolist()
