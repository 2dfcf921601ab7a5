"""Alignments worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mutualrl.thl import Group, align_batch, align_logprobs, decode_completion, retokenize, token_offsets
from thl_tokenizers import byte_bpe, own, sentencepiece_like, unigram

CHARACTERS = byte_bpe()
#: abc | de
MERGED = byte_bpe("a·b", "ab·c", "d·e")
#: a | bcd | e
CROSSED = byte_bpe("b·c", "bc·d")


def ids(text: str, tokenizer: object) -> tuple[int, ...]:
    return retokenize(text, tokenizer).ids


def nan_equal(found: np.ndarray, expected: list[float | None]) -> bool:
    return np.array_equal(found, [np.nan if e is None else e for e in expected], equal_nan=True)


def test_span_copies_single_tokens_and_spreads_the_rest() -> None:
    aligned = align_logprobs("abcde", ids("abcde", MERGED), [-6.0, -1.0], MERGED, CROSSED, anchor="span")
    # abc|de against a|bcd|e: the only shared end is the last
    assert aligned.logprobs.tolist() == pytest.approx([-7 / 3] * 3)
    assert aligned.groups == (Group(range(0, 2), range(0, 3)),)
    aligned = align_logprobs("abcde", ids("abcde", MERGED), [-6.0, -1.0], MERGED, CHARACTERS, anchor="span")
    assert aligned.logprobs.tolist() == [-2.0, -2.0, -2.0, -0.5, -0.5]
    assert aligned.groups == (Group(range(0, 1), range(0, 3)), Group(range(1, 2), range(3, 5)))
    back = align_logprobs("abcde", ids("abcde", CHARACTERS), [-1.0, -2.0, -4.0, -8.0, -16.0], CHARACTERS, MERGED)
    assert back.logprobs.tolist() == [-7.0, -24.0]


def test_word_spreads_evenly_and_a_token_over_two_words_is_shared_out_by_characters() -> None:
    source = byte_bpe("b·Ġ", "bĠ·c")  # a | "b c" | d
    text = "ab cd"
    # "b c": 1 character in "ab", 2 in " cd"
    aligned = align_logprobs(text, ids(text, source), [-1.0, -3.0, -5.0], source, CHARACTERS, anchor="word")
    assert aligned.logprobs.tolist() == pytest.approx([-1.0, -1.0, -7 / 3, -7 / 3, -7 / 3])
    assert aligned.groups == (Group(range(0, 2), range(0, 2)), Group(range(1, 3), range(2, 5)))
    # the other way: "b c" touches both words and gets its part of each
    back = align_logprobs(
        text, ids(text, CHARACTERS), [-1.0, -2.0, -3.0, -4.0, -5.0], CHARACTERS, source, anchor="word"
    )
    assert back.logprobs.tolist() == pytest.approx([-1.5, -1.5 - 6.0, -6.0])


def test_blanks_go_with_the_word_behind_them_and_trailing_blanks_are_a_segment() -> None:
    text = "a  b "
    trace = [-1.0, -2.0, -4.0, -8.0, -16.0]
    aligned = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, CHARACTERS, anchor="word")
    assert aligned.logprobs.tolist() == pytest.approx([-1.0, -14 / 3, -14 / 3, -14 / 3, -16.0])
    blank = align_logprobs("  ", ids("  ", CHARACTERS), [-1.0, -3.0], CHARACTERS, CHARACTERS, anchor="word")
    assert blank.logprobs.tolist() == [-2.0, -2.0]


def test_characters_split_over_tokens() -> None:
    """日 is three bytes: one token each here, one token for all there, and one that ends inside the next character."""
    whole = byte_bpe("æ·Ĺ", "æĹ·¥")  # 日
    across = byte_bpe("¥·æ", "¥æ·ľ")  # 日本 as E6 | 97 | A5 E6 9C | AC
    text = "日本"
    assert token_offsets(ids(text, whole), whole).tolist() == [[0, 3], [3, 4], [4, 5], [5, 6]]
    assert token_offsets(ids(text, across), across).tolist() == [[0, 1], [1, 2], [2, 5], [5, 6]]
    aligned = align_logprobs(text, ids(text, whole), [-3.0, -1.0, -2.0, -4.0], whole, across, anchor="span")
    # shared ends: 5 and 6
    assert aligned.logprobs.tolist() == pytest.approx([-2.0, -2.0, -2.0, -4.0])
    characters = align_logprobs(text, ids(text, across), [-1.0, -2.0, -6.0, -4.0], across, whole, anchor="char")
    # A5 is a third of 日, E6 9C two thirds of 本: the token gives 日 1/3 and 本 2/3
    assert characters.logprobs.tolist() == pytest.approx([-5.0, -8 / 3, -8 / 3, -8 / 3])


def test_a_cjk_text_is_aligned_by_characters_unless_words_are_asked_for() -> None:
    text = "a日b"
    trace = [-1.0, -2.0, -3.0, -4.0, -5.0]
    auto = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, CHARACTERS, anchor="word")
    assert auto.logprobs.tolist() == pytest.approx([-1.0, -3.0, -3.0, -3.0, -5.0])
    word = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, CHARACTERS, anchor="word", unit="word")
    assert word.logprobs.tolist() == pytest.approx([-3.0] * 5)


def test_a_lone_leading_metaspace_goes_with_the_next_token() -> None:
    tokenizer = sentencepiece_like()
    blank = tokenizer.convert_tokens_to_ids("▁")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "so"]
    alone = [blank, *letters]  # as an encoder makes it: decoded alone, the blank is not in the text
    assert token_offsets(alone, tokenizer, "so").tolist() == [[0, 0], [0, 1], [1, 2]]
    assert token_offsets(alone, tokenizer, " so").tolist() == [[0, 1], [1, 2], [2, 3]]
    span = align_logprobs("so", alone, [-1.0, -2.0, -4.0], tokenizer, CHARACTERS, anchor="span")
    assert span.logprobs.tolist() == [-3.0, -4.0]
    word = align_logprobs("so", alone, [-1.0, -2.0, -4.0], tokenizer, CHARACTERS, anchor="word")
    assert word.logprobs.tolist() == [-3.5, -3.5]
    back = align_logprobs("so", ids("so", CHARACTERS), [-2.0, -4.0], CHARACTERS, tokenizer, target_ids=alone)
    assert back.logprobs.tolist() == [-1.0, -1.0, -4.0]
    same = align_logprobs("so", alone, [-1.0, -2.0, -4.0], tokenizer, tokenizer, target_ids=alone)
    assert same.logprobs.tolist() == [-1.0, -2.0, -4.0]


def test_special_tokens_inside_a_response() -> None:
    """Placed nowhere, unless the other side has the same one at the same byte; the end goes to the end."""
    tokenizer = sentencepiece_like()
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    sampled = [*ids("so", tokenizer), start, *ids(" it", tokenizer), end]
    text = decode_completion(sampled, tokenizer)
    assert text == "so it"
    trace = [-1.0] * (len(sampled) - 2) + [-0.25, -9.0]
    trace[sampled.index(start)] = -5.0
    trace[-2] = -1.0
    aligned = align_logprobs(text, sampled, trace, tokenizer, CHARACTERS)
    assert aligned.covered.all()
    assert aligned.residual == -5.0
    assert aligned.mismatched == 1
    assert aligned.logprobs[-1] == -9.0
    assert aligned.target_ids[-1] == CHARACTERS.eos_token_id
    same = align_logprobs(text, sampled, trace, tokenizer, tokenizer, target_ids=sampled)
    assert same.logprobs.tolist() == trace
    assert same.residual == 0.0


def test_a_further_end_token_counts_as_the_end_when_it_is_named() -> None:
    tokenizer = sentencepiece_like()
    sampled = [*ids("so", tokenizer), tokenizer.bos_token_id]
    trace = [-1.0] * len(sampled)
    truncated = align_logprobs("so", sampled, trace, tokenizer, CHARACTERS)
    assert truncated.target_ids == ids("so", CHARACTERS)
    assert truncated.residual == -1.0
    ended = align_logprobs("so", sampled, trace, tokenizer, CHARACTERS, source_eos_ids={tokenizer.bos_token_id})
    assert ended.target_ids == (*ids("so", CHARACTERS), CHARACTERS.eos_token_id)
    assert ended.residual == 0.0


def test_an_end_on_one_side_only_is_placed_nowhere() -> None:
    text = "ab"
    source = [*ids(text, CHARACTERS), CHARACTERS.eos_token_id]
    dropped = align_logprobs(text, source, [-1.0, -2.0, -3.0], CHARACTERS, MERGED, target_ids=ids(text, MERGED))
    assert dropped.logprobs.tolist() == [-3.0]
    assert (dropped.residual, dropped.mismatched) == (-3.0, 1)
    missing = align_logprobs(
        text, source[:-1], [-1.0, -2.0], CHARACTERS, MERGED, target_ids=[*ids(text, MERGED), MERGED.eos_token_id]
    )
    assert nan_equal(missing.logprobs, [-3.0, None])
    assert (missing.residual, missing.mismatched) == (0.0, 0)


def test_bytes_that_are_no_utf8_are_those_of_the_replacement_character() -> None:
    lone = CHARACTERS.convert_tokens_to_ids("æ")
    sampled = [*ids("a", CHARACTERS), lone, lone, *ids("b", CHARACTERS)]
    text = decode_completion(sampled, CHARACTERS)
    assert text == "a\ufffd\ufffdb"
    assert token_offsets(sampled, CHARACTERS).tolist() == [[0, 1], [1, 4], [4, 7], [7, 8]]
    aligned = align_logprobs(text, sampled, [-1.0, -3.0, -6.0, -2.0], CHARACTERS, CHARACTERS)
    assert aligned.logprobs.tolist() == pytest.approx([-1.0, -1.0, -1.0, -1.0, -2.0, -2.0, -2.0, -2.0])
    prefix = [CHARACTERS.convert_tokens_to_ids(c) for c in "æĹ"]  # two bytes of 日: one replacement
    text = decode_completion([*prefix, *ids("b", CHARACTERS)], CHARACTERS)
    assert text == "\ufffdb"
    assert token_offsets([*prefix, *ids("b", CHARACTERS)], CHARACTERS).tolist() == [[0, 0], [0, 3], [3, 4]]


def test_byte_tokens_that_are_no_utf8_become_a_replacement_each() -> None:
    tokenizer = unigram()
    sampled = [tokenizer.convert_tokens_to_ids(piece) for piece in ("s", "<0xE6>", "<0x97>", "o")]
    text = decode_completion(sampled, tokenizer)
    assert text == "s\ufffd\ufffdo"
    assert token_offsets(sampled, tokenizer).tolist() == [[0, 1], [1, 4], [4, 7], [7, 8]]


def test_what_a_normaliser_changes_is_masked_and_counted_and_the_rest_is_exact() -> None:
    lower = sentencepiece_like("Lowercase")
    text = "so It is"
    trace = [-float(i + 1) for i in range(len(text))]
    for anchor in ("span", "word"):
        aligned = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, lower, anchor=anchor)
        assert not aligned.exact
        read = [lower.convert_ids_to_tokens(i).replace("▁", " ") for i in aligned.target_ids]
        assert "".join(read) == "so it is"
        start = 0
        for piece, value, covered in zip(read, aligned.logprobs, aligned.covered, strict=True):
            assert covered == ("i" not in piece or start > 4)
            if covered and anchor == "span" and len(piece) == 1:
                assert value == trace[start]
            start += len(piece)
        lost = trace[3] if anchor == "span" else sum(trace[2:5])  # "I", or the word " It"
        assert aligned.residual == pytest.approx(lost + (0 if anchor == "word" else _with_neighbours(read, trace)))
        assert aligned.mismatched >= 1


def _with_neighbours(read: list[str], trace: list[float]) -> float:
    """Mass of the other characters in the token that has the changed one."""
    start = 0
    for piece in read:
        if start <= 3 < start + len(piece):
            return sum(trace[start : start + len(piece)]) - trace[3]
        start += len(piece)
    raise AssertionError(read)


def test_unknown_characters_are_masked_and_counted() -> None:
    target = own("unigram-unk")
    text = "time 日 once"
    source_ids = ids(text, CHARACTERS)
    trace = [-1.0] * len(source_ids)
    aligned = align_logprobs(text, source_ids, trace, CHARACTERS, target)
    assert not aligned.exact
    unknown = aligned.target_ids.index(target.unk_token_id)
    assert not aligned.covered[unknown]
    assert aligned.residual == pytest.approx(float(len(source_ids) * -1.0 - np.nansum(aligned.logprobs)))
    assert -6.0 <= aligned.residual <= -3.0  # the three bytes, and the blanks beside them where they share a token


def test_the_clip_takes_from_the_value_and_gives_to_the_residual() -> None:
    aligned = align_logprobs("abc", ids("abc", CHARACTERS), [-60.0, -1.0, -2.0], CHARACTERS, MERGED)
    assert aligned.logprobs.tolist() == [-53.0]
    assert (aligned.clipped, aligned.residual, aligned.mismatched) == (-10.0, -10.0, 0)
    loose = align_logprobs("abc", ids("abc", CHARACTERS), [-60.0, -1.0, -2.0], CHARACTERS, MERGED, bound=100.0)
    assert loose.logprobs.tolist() == [-63.0]
    gone = align_logprobs("abc", ids("abc", CHARACTERS), [-np.inf, -1.0, -2.0], CHARACTERS, MERGED)
    assert gone.logprobs.tolist() == [-53.0]
    assert gone.residual == -np.inf


def test_the_behaviour_log_probs_of_a_batch_take_the_learner_s_own_where_uncovered() -> None:
    import torch

    text = "ab"
    batch = align_batch(
        [text, "a"], [ids(text, CHARACTERS), ids("a", CHARACTERS)], [[-1.0, -2.0], [-4.0]], CHARACTERS, MERGED,
        target_ids=[[*ids(text, MERGED), MERGED.eos_token_id], ids("a", MERGED)],
    )  # fmt: skip
    assert batch.covered.tolist() == [[True, False], [True, False]]
    assert batch.tokens.tolist() == [[True, True], [True, False]]
    assert batch.uncovered.tolist() == [1, 0]
    own_logprobs = torch.full((2, 2), -0.5, requires_grad=True)
    behaviour = batch.behaviour(own_logprobs)
    assert behaviour.tolist() == [[-3.0, -0.5], [-4.0, -0.5]]
    assert not behaviour.requires_grad
    with pytest.raises(ValueError, match=r"shape \(1, 2\), expected \(2, 2\)"):
        batch.behaviour(torch.zeros(1, 2))


def test_tokens_added_later_are_known() -> None:
    tokenizer = byte_bpe()
    assert token_offsets(ids("ab", tokenizer), tokenizer).tolist() == [[0, 1], [1, 2]]
    tokenizer.add_tokens(["ab"])
    assert token_offsets(ids("ab", tokenizer), tokenizer).tolist() == [[0, 2]]
