"""Properties of alignments for every pair of tokenizers, on texts in many scripts, with canonical and other ids."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mutualrl.thl import (
    ANCHORS,
    align_batch,
    align_logprobs,
    decode_completion,
    has_cjk,
    retokenize,
    token_offsets,
    word_spans,
)
from thl_tokenizers import ALL, LOSSY, any_tokenizer, independent_bytes, resplit, vocabulary_of

TEXTS = (
    "",
    "   ",
    "\n",
    "Hello world.\nNext  line\r\nand\ttabs. ",
    "We have $\\frac{x^2}{3} = \\boxed{12}$.\n\n[asy] draw((0,0)); [/asy]",
    "def f(x):\r\n    return x**2  # square\n\n\tif x:\n        pass\n",
    "日本語の文章と、中文的句子。한국어 문장 한 줄.",
    "نص عربي قصير مع أرقام ١٢٣ و 456",
    "ไทยไม่มีช่องว่างระหว่างคำ",
    "हिन्दी में एक वाक्य है।",
    "family 👩‍👩‍👧 flags 🇩🇪🇯🇵 skin 👍🏽!",
    "combining e\u0301 a\u030a o\u0308, composed é å ö",
    "3.14159 2718281828 1,000,000 12+30=42",
    " leading and trailing whitespace  ",
    "<|im_end|> </s> <eos> spelled out",
)
PIECES = st.sampled_from(
    [*TEXTS, " ", "\n\n", ".\n", "é", "日", "x", "1", "👍🏽", "\u00a0", "\u3000", "ไ", "ﬁ", "\ufffd"]
)
any_text = st.one_of(
    st.lists(PIECES, max_size=3).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
PAIRS = [(a, b) for a in ALL for b in ALL]


def pair_name(pair: tuple[str, str]) -> str:
    return f"{pair[0]}->{pair[1]}"


class Case:
    """Response of the source: ids (canonical or re-split at random), text and log-probs; and the target's ids."""

    def __init__(self, pair: tuple[str, str], text: str, seed: int) -> None:
        self.source, self.target = map(any_tokenizer, pair)
        rng = random.Random(seed)
        controls = vocabulary_of(self.source)[2]
        ids = [i for i in retokenize(text, self.source).ids if i not in controls]
        self.ids = resplit(ids, self.source, rng) if seed % 2 else ids
        self.text = decode_completion(self.ids, self.source)
        self.logprobs = [-rng.expovariate(1.0) for _ in self.ids]
        retokenized = retokenize(self.text, self.target)
        self.exact = retokenized.exact
        target_ids = list(retokenized.ids)
        self.target_ids = resplit(target_ids, self.target, rng) if retokenized.exact and seed % 4 > 1 else None

    def align(self, anchor: str, **kwargs: Any) -> Any:
        if self.target_ids is not None:
            kwargs.setdefault("target_ids", self.target_ids)
        return align_logprobs(self.text, self.ids, self.logprobs, self.source, self.target, anchor=anchor, **kwargs)


def byte_ends(ids: Any, tokenizer: Any, text: str) -> list[int]:
    """Return the byte at which each token ends, computed without the package; the space that a decoder strips is not
    counted."""
    ends = list(accumulate(len(independent_bytes(i, tokenizer)) for i in ids))
    extra = (ends[-1] if ends else 0) - len(text.encode())
    assert extra in (0, 1)
    return [max(0, end - extra) for end in ends]


def cumulative(ends: list[int], values: Any) -> dict[int, float]:
    """Map the byte at which each token ends to the sum of all values up to it."""
    return dict(zip(ends, np.cumsum(values).tolist(), strict=True))


def close(a: float, b: float, scale: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(scale))


quick = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def require_compared(pair: tuple[str, str], compared: Counter[bool], share: float, lossy: float) -> None:
    """Fail where too few cases of a property were compared with anything: less than `share`, or, where a tokenizer
    changes most texts, `lossy`."""
    least = lossy if any(name in LOSSY for name in pair) else share
    assert compared[True] >= least * compared.total() > 0, (pair, compared)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_mass_is_conserved_and_keeps_its_position(pair: tuple[str, str]) -> None:
    compared = Counter[bool]()

    @quick
    @given(text=any_text, seed=st.integers(0, 7))
    @example(text=TEXTS[3] + TEXTS[6], seed=0)
    @example(text=TEXTS[4] + TEXTS[10], seed=3)
    @example(text=TEXTS[11] + TEXTS[5], seed=2)
    def conserved(text: str, seed: int) -> None:
        case = Case(pair, text, seed)
        compared[case.exact] += 1
        total = sum(case.logprobs)
        for anchor in ANCHORS:
            aligned = case.align(anchor)
            assert aligned.logprobs.shape == aligned.covered.shape == (len(aligned.target_ids),)
            assert np.array_equal(np.isnan(aligned.logprobs), ~aligned.covered)
            assert close(float(aligned.logprobs[aligned.covered].sum()) + aligned.residual, total, total)
            assert aligned.exact == case.exact
            if anchor.startswith("paper") or not case.exact:
                continue
            assert aligned.residual == 0.0
            assert aligned.mismatched == 0
            assert aligned.covered.all()
            before = cumulative(byte_ends(case.ids, case.source, case.text), case.logprobs)
            after = cumulative(byte_ends(aligned.target_ids, case.target, case.text), aligned.logprobs)
            shared = set(before) & set(after)
            if anchor != "span":
                unit = r"\S" if anchor == "char" or has_cjk(case.text) else r"\S+"
                shared &= {len(case.text[: m.end()].encode()) for m in re.finditer(unit, case.text)}
            assert all(close(before[byte], after[byte], total) for byte in shared)

    conserved()
    require_compared(pair, compared, 0.5, 0.1)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_changing_the_tail_leaves_values_before_a_closed_group_unchanged(pair: tuple[str, str]) -> None:
    """Earlier ids of both sides are unchanged; under `word`, a group closes at a word's end if whitespace follows."""
    compared = Counter[bool]()

    @quick
    @given(head=any_text, tails=st.tuples(any_text, any_text), seed=st.integers(0, 7))
    def unchanged(head: str, tails: tuple[str, str], seed: int) -> None:
        case = Case(pair, head, seed)
        target_ids = list(retokenize(case.text, case.target).ids)
        for anchor in ("span", "word"):
            values = []
            for tail in tails if case.exact else ():
                separator = "" if anchor == "span" else " "
                added = [list(retokenize(separator + tail, t).ids) for t in (case.source, case.target)]
                text = case.text + separator + tail
                source_ids, all_target = case.ids + added[0], target_ids + added[1]
                if decode_completion(source_ids, case.source) != text:
                    break
                if decode_completion(all_target, case.target) != text:
                    break
                aligned = align_logprobs(
                    text,
                    source_ids,
                    case.logprobs + [-1.0] * len(added[0]),
                    case.source,
                    case.target,
                    target_ids=all_target,
                    anchor=anchor,
                    unit="word",
                )
                values.append(aligned.logprobs[: len(target_ids)])
            closed = anchor == "span" or (bool(case.text) and not case.text[-1].isspace())
            compared[len(values) == 2 and closed] += 1
            if len(values) == 2 and closed:
                assert np.array_equal(values[0], values[1])

    unchanged()
    require_compared(pair, compared, 0.3, 0.05)


@pytest.mark.parametrize("name", ALL)
@settings(quick, max_examples=30)
@given(text=any_text, seed=st.integers(0, 7), ended=st.booleans())
def test_same_ids_on_both_sides_give_the_identity(name: str, text: str, seed: int, ended: bool) -> None:
    case = Case((name, name), text, seed)
    ids = [*case.ids, case.source.eos_token_id] if ended else case.ids
    logprobs = [*case.logprobs, -0.5] if ended else case.logprobs
    same = align_logprobs(case.text, ids, logprobs, case.source, case.source, target_ids=ids, anchor="span")
    assert same.logprobs.tolist() == logprobs
    words = align_logprobs(case.text, ids, logprobs, case.source, case.source, target_ids=ids, anchor="word")
    ends = byte_ends(ids, case.source, case.text)
    at_words = {len(case.text[:end].encode()) for _, end in word_spans(case.text)} & set(ends)
    before, after = cumulative(ends, logprobs), cumulative(ends, words.logprobs)
    assert all(close(before[byte], after[byte], sum(logprobs)) for byte in at_words)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_eos_maps_to_eos_and_is_never_added(pair: tuple[str, str]) -> None:
    case = Case(pair, "So it is 42.", 0)
    eos, target_eos = case.source.eos_token_id, case.target.eos_token_id
    for anchor in ("span", "word", "char"):
        ended = align_logprobs(
            case.text, [*case.ids, eos], [*case.logprobs, -7.25], case.source, case.target, anchor=anchor
        )
        assert ended.target_ids[-1] == target_eos
        assert ended.logprobs[-1] == -7.25
        assert ended.groups[-1] == (
            range(len(case.ids), len(case.ids) + 1),
            range(len(ended.target_ids) - 1, len(ended.target_ids)),
        )
        truncated = case.align(anchor)
        assert target_eos not in truncated.target_ids
        assert ended.target_ids[:-1] == truncated.target_ids
        assert np.array_equal(ended.logprobs[:-1], truncated.logprobs, equal_nan=True)


@pytest.mark.parametrize("name", ALL)
@settings(quick, max_examples=30)
@given(text=any_text, seed=st.integers(0, 7))
def test_offsets_partition_the_text_and_equal_independent_ones(name: str, text: str, seed: int) -> None:
    case = Case((name, name), text, seed)
    offsets = token_offsets(case.ids, case.source, case.text)
    assert offsets[:, 1].tolist() == byte_ends(case.ids, case.source, case.text)
    assert offsets[:, 0].tolist() == [0, *offsets[:-1, 1].tolist()][: len(case.ids)]
    assert (offsets[-1, 1] if len(offsets) else 0) == len(case.text.encode())


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
@settings(quick, max_examples=3)
@given(texts=st.lists(any_text, min_size=1, max_size=3), seed=st.integers(0, 7))
def test_batch_equals_single_alignments_padded_and_filled(pair: tuple[str, str], texts: list[str], seed: int) -> None:
    cases = [Case(pair, text, seed + i) for i, text in enumerate(texts)]
    singles = [case.align("span", target_ids=None) for case in cases]
    learner_logprobs = [[-0.25] * len(single.target_ids) for single in singles]
    batch = align_batch(
        [c.text for c in cases],
        [c.ids for c in cases],
        [c.logprobs for c in cases],
        cases[0].source,
        cases[0].target,
        own_logprobs=learner_logprobs,
        anchor="span",
        pad_id=7,
    )
    assert not np.isnan(batch.logprobs).any()
    for row, single in enumerate(singles):
        length = len(single.target_ids)
        assert batch.tokens[row].tolist() == [True] * length + [False] * (batch.tokens.shape[1] - length)
        assert tuple(batch.target_ids[row, :length]) == single.target_ids
        assert set(batch.target_ids[row, length:]) <= {7}
        assert np.array_equal(batch.logprobs[row, :length], np.where(single.covered, single.logprobs, -0.25))
        assert batch.uncovered[row] == (~single.covered).sum()
        assert batch.residual[row] == single.residual


@pytest.mark.parametrize("name", LOSSY)
def test_texts_of_this_module_exercise_every_lossy_tokenizer(name: str) -> None:
    """Otherwise the branch for such tokenizers would not be tested above."""
    assert not all(retokenize(text, any_tokenizer(name)).exact for text in TEXTS)
