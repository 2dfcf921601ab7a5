"""A model's judgement of another's tokens, by byte groups."""

from __future__ import annotations

import numpy as np
import pytest

from mutualrl.thl.judged import Read, loops, token_ratios


def read(tokens: list[str], logprobs: list[float], *, ended: bool = True) -> Read:
    """Return a reading of the text that tokens spell; with `ended`, one more log-prob is that of the end token."""
    ends = np.cumsum([len(token.encode()) for token in tokens])
    return Read(np.append(ends, ends[-1:] if ended else []).astype(np.int64), np.array(logprobs), ended)


def test_groups_by_hand() -> None:
    """`a|b|cd` and end, read by the other as `ab|cd` and end: (-1 - 1) - (-1 - 2) over two tokens; -1 + 3; -0.25 + 0.5."""
    own, other = read(["a", "b", "cd"], [-1, -2, -3, -0.5]), read(["ab", "cd"], [-1, -1, -0.25])
    ratios = token_ratios(own, other, 8)
    assert ratios.values.tolist() == [1.0, 1.0, 2.0, 0.25]
    assert ratios.judged.tolist() == [True] * 4
    assert ratios.uneven.tolist() == [True, True, False, False]
    split = token_ratios(other, own, 8)  # the other way: one token against two
    assert split.values.tolist() == [-2.0, -2.0, -0.25]
    assert split.uneven.tolist() == [True, False, False]


def test_the_same_reading_is_zero_and_one_tokenizer_is_the_difference() -> None:
    random = np.random.default_rng(0)
    tokens, values = ["x", "yz", "\u20ac", "!"], random.normal(size=(2, 5))
    own = read(tokens, values[0].tolist())
    assert not token_ratios(own, own, 1).values.any()
    other = read(tokens, values[1].tolist())
    assert token_ratios(own, other, 1).values == pytest.approx(values[1] - values[0], abs=1e-12)


def test_long_groups_are_left_out_and_what_follows_is_not() -> None:
    own, other = read(["a", "b", "c", "d"], [-1.0] * 5), read(["abc", "d"], [-2.0] * 3)
    ratios = token_ratios(own, other, 2)
    assert ratios.judged.tolist() == [False] * 3 + [True] * 2
    assert ratios.values.tolist() == [0.0] * 3 + [-1.0] * 2


def test_nothing_is_judged_from_a_token_without_bytes_on() -> None:
    """A control token inside the text, or one that ends inside an invalid sequence."""
    own = Read(np.array([1, 1, 2, 2]), np.array([-1.0, -1, -1, -1]), True)
    other = Read(np.array([1, 2, 2]), np.array([-3.0, -3, -3]), True)
    assert token_ratios(own, other, 8).judged.tolist() == [True, False, False, False]
    assert token_ratios(other, own, 8).judged.tolist() == [True, False, False]


def test_end_tokens_are_a_pair_only_where_both_ended() -> None:
    own, other = read(["a"], [-1.0], ended=False), read(["a"], [-2.0, -0.5])
    assert token_ratios(own, other, 8).values.tolist() == [-1.0]
    assert token_ratios(other, own, 8).judged.tolist() == [True, False]
    silent = Read(np.zeros(0, dtype=np.int64), np.array([-1.0]), True), Read(np.array([0]), np.array([-0.25]), True)
    assert token_ratios(*silent, 8).values.tolist() == [0.75]


def test_readings_of_two_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="different texts"):
        token_ratios(read(["a"], [-1, -1]), read(["ab"], [-1, -1]), 8)


@pytest.mark.parametrize("seed", range(20))
def test_mass_is_kept_against_a_plain_loop(seed: int) -> None:
    """Independent: walk over the bytes, close a group where both sides end, compare values and the total."""
    random = np.random.default_rng(seed)
    size = int(random.integers(3, 30))
    cuts = [sorted({*random.choice(size - 1, size // 2, replace=False).tolist(), size - 1}) for _ in range(2)]
    ends = [np.array(each) + 1 for each in cuts]
    logprobs = [random.normal(size=len(each) + 1) for each in ends]
    own, other = (Read(np.append(e, e[-1]), values, True) for e, values in zip(ends, logprobs, strict=True))
    expected, mine, theirs = np.zeros(len(logprobs[0])), [], []
    for byte in range(1, size + 1):
        mine += [place for place, end in enumerate(ends[0]) if end == byte]
        theirs += [place for place, end in enumerate(ends[1]) if end == byte]
        if byte in ends[0] and byte in ends[1]:
            difference = logprobs[1][theirs].sum() - logprobs[0][mine].sum()
            expected[mine] = difference / len(mine)
            mine, theirs = [], []
    expected[-1] = logprobs[1][-1] - logprobs[0][-1]
    found = token_ratios(own, other, size)
    assert found.values == pytest.approx(expected, abs=1e-12)
    assert found.values.sum() == pytest.approx(logprobs[1].sum() - logprobs[0].sum(), abs=1e-9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so x = 3, and then " + "and then " * 20, True),
        ("ab" * 40, True),
        ("ab" * 40 + " done", False),  # it found its way out
        ("the sum is 10000000", False),
        ("one two three four", False),
        ("", False),
        (("x" * 150 + "\n") * 5, True),
    ],
)
def test_a_text_that_loops_at_its_end(text: str, expected: bool) -> None:
    assert loops(text) is expected
