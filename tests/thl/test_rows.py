"""Many texts at once equal one text at a time, bit for bit, for every pair of tokenizers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_properties import PAIRS, TEXTS, pair_name

from mutualrl.thl import align_logprobs, decode_completion, retokenize
from mutualrl.thl.rows import Traced, align_spans, encode_exactly
from mutualrl.thl.table import table_of
from thl_tokenizers import ALL, any_tokenizer, resplit

MIXED = [*TEXTS, *(f"{a} {b}" for a in TEXTS for b in TEXTS[3:8])]


@pytest.mark.parametrize("name", ALL)
def test_texts_are_encoded_as_one_by_one(name: str) -> None:
    tokenizer = any_tokenizer(name)
    rows = encode_exactly(MIXED, tokenizer)
    for text, ids in zip(MIXED, rows, strict=True):
        expected = retokenize(text, tokenizer)
        if ids is not None:
            assert expected.exact
            assert ids.tolist() == list(expected.ids)
    assert rows[0] is None  # an empty text has no tokens


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_traces_are_aligned_as_one_by_one(pair: tuple[str, str]) -> None:
    source, target = (any_tokenizer(name) for name in pair)
    rng = random.Random(pair_name(pair))
    rows = []
    for number, original in enumerate(MIXED):
        ids = list(retokenize(original, source).ids)
        if number % 2:
            ids = resplit(ids, source, rng)
        text, done = decode_completion(ids, source), number % 3 > 0
        target_ids = list(retokenize(text, target).ids)
        if done:
            ids, target_ids = [*ids, source.eos_token_id], [*target_ids, target.eos_token_id]
        trace = np.array([-rng.expovariate(1.0) for _ in ids], dtype=np.float32)
        if number % 17 == 5 and ids:
            trace[0] = -60.0
        source_ids = np.array(ids, dtype=np.int32)
        rows.append(Traced(text, source_ids, trace, np.array(target_ids, dtype=np.int32), done))
    values = align_spans(rows, table_of(source), table_of(target))
    for row, aligned in zip(rows, values, strict=True):
        if aligned is None:
            continue
        end = [row.source_ids[-1:].tolist(), row.target_ids[-1:].tolist()] if row.ended else [(), ()]
        expected = align_logprobs(
            *(row.text, row.source_ids, row.logprobs, source, target),
            target_ids=row.target_ids,
            source_eos_ids=end[0],
            target_eos_ids=end[1],
        )
        assert aligned.tobytes() == expected.logprobs.tobytes()
        (known,) = align_spans([row._replace(exact=True)], table_of(source), table_of(target))
        assert known is not None and known.tobytes() == aligned.tobytes()
        assert expected.covered.all()
        assert (expected.residual, expected.mismatched, expected.clipped) == (0.0, 0, 0.0)


def test_plain_rows_need_no_other_path_and_odd_ones_do() -> None:
    source, target = any_tokenizer("ada"), any_tokenizer("bob")
    ids = np.array(retokenize("12 + 30 = 42", source).ids, dtype=np.int32)
    target_ids = np.array(retokenize("12 + 30 = 42", target).ids, dtype=np.int32)
    trace = np.full(len(ids), -0.5, dtype=np.float32)
    plain = Traced("12 + 30 = 42", ids, trace, target_ids, False)
    odd = {
        "other text": plain._replace(text="12 + 30 = 43"),
        "no id of the vocabulary": plain._replace(source_ids=np.where(ids == ids[0], 10**6, ids).astype(np.int32)),
        "negative id": plain._replace(source_ids=np.where(ids == ids[0], -1, ids).astype(np.int32)),
        "below the bound": plain._replace(logprobs=trace * 200),
        "not a number": plain._replace(logprobs=trace * np.float32("nan")),
        "too short a trace": plain._replace(logprobs=trace[1:]),
        "control token": plain._replace(target_ids=np.append(target_ids, np.int32(target.eos_token_id))),
        "target of another text": plain._replace(target_ids=target_ids[::-1].copy()),
        "empty": Traced("", ids[:0], trace[:0], target_ids[:0], False),
    }
    rows = [row for other in odd.values() for row in (plain, other)]
    values = align_spans(rows, table_of(source), table_of(target))
    assert [value is None for value in values] == [False, True] * len(odd)
    (alone,) = align_spans([plain], table_of(source), table_of(target))
    assert alone is not None
    assert all(value.tobytes() == alone.tobytes() for value in values[::2] if value is not None)
