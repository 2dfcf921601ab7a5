"""Alignments computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from mutualrl.thl import AlignmentGroup, align_batch, align_logprobs, decode_completion, retokenize, token_offsets
from thl_tokenizers import byte_bpe, independent_bytes, sentencepiece_like, synthetic, unigram

CHARACTERS = byte_bpe()
#: abc | de
MERGED = byte_bpe("a·b", "ab·c", "d·e")
#: a | bcd | e
CROSSED = byte_bpe("b·c", "bc·d")


def ids(text: str, tokenizer: object) -> tuple[int, ...]:
    return retokenize(text, tokenizer).ids


def nan_equal(result: np.ndarray, expected: list[float | None]) -> bool:
    return np.array_equal(result, [np.nan if e is None else e for e in expected], equal_nan=True)


def test_span_copies_single_tokens_and_spreads_the_rest() -> None:
    aligned = align_logprobs("abcde", ids("abcde", MERGED), [-6.0, -1.0], MERGED, CROSSED, anchor="span")
    # abc|de vs. a|bcd|e: only the last token end is shared
    assert aligned.logprobs.tolist() == pytest.approx([-7 / 3] * 3)
    assert aligned.groups == (AlignmentGroup(range(0, 2), range(0, 3)),)
    aligned = align_logprobs("abcde", ids("abcde", MERGED), [-6.0, -1.0], MERGED, CHARACTERS, anchor="span")
    assert aligned.logprobs.tolist() == [-2.0, -2.0, -2.0, -0.5, -0.5]
    assert aligned.groups == (AlignmentGroup(range(0, 1), range(0, 3)), AlignmentGroup(range(1, 2), range(3, 5)))
    reverse = align_logprobs("abcde", ids("abcde", CHARACTERS), [-1.0, -2.0, -4.0, -8.0, -16.0], CHARACTERS, MERGED)
    assert reverse.logprobs.tolist() == [-7.0, -24.0]


def test_word_spreads_evenly_and_splits_a_straddling_token_by_characters() -> None:
    source = byte_bpe("b·Ġ", "bĠ·c")  # a | "b c" | d
    text = "ab cd"
    # "b c": 1 character in "ab", 2 in " cd"
    aligned = align_logprobs(text, ids(text, source), [-1.0, -3.0, -5.0], source, CHARACTERS, anchor="word")
    assert aligned.logprobs.tolist() == pytest.approx([-1.0, -1.0, -7 / 3, -7 / 3, -7 / 3])
    assert aligned.groups == (AlignmentGroup(range(0, 2), range(0, 2)), AlignmentGroup(range(1, 3), range(2, 5)))
    # reverse: "b c" touches both words and gets a part of each
    reverse = align_logprobs(
        text, ids(text, CHARACTERS), [-1.0, -2.0, -3.0, -4.0, -5.0], CHARACTERS, source, anchor="word"
    )
    assert reverse.logprobs.tolist() == pytest.approx([-1.5, -1.5 - 6.0, -6.0])


def test_whitespace_belongs_to_the_next_word_and_trailing_whitespace_is_a_segment() -> None:
    text = "a  b "
    trace = [-1.0, -2.0, -4.0, -8.0, -16.0]
    aligned = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, CHARACTERS, anchor="word")
    assert aligned.logprobs.tolist() == pytest.approx([-1.0, -14 / 3, -14 / 3, -14 / 3, -16.0])
    whitespace = align_logprobs("  ", ids("  ", CHARACTERS), [-1.0, -3.0], CHARACTERS, CHARACTERS, anchor="word")
    assert whitespace.logprobs.tolist() == [-2.0, -2.0]


def test_characters_split_across_tokens() -> None:
    """日 is one three-byte token in one tokenizer; in the other, its last byte shares a token with 本."""
    single = byte_bpe("æ·Ĺ", "æĹ·¥")  # 日
    across = byte_bpe("¥·æ", "¥æ·ľ")  # 日本 as E6 | 97 | A5 E6 9C | AC
    text = "日本"
    assert token_offsets(ids(text, single), single).tolist() == [[0, 3], [3, 4], [4, 5], [5, 6]]
    assert token_offsets(ids(text, across), across).tolist() == [[0, 1], [1, 2], [2, 5], [5, 6]]
    aligned = align_logprobs(text, ids(text, single), [-3.0, -1.0, -2.0, -4.0], single, across, anchor="span")
    # shared ends: 5 and 6
    assert aligned.logprobs.tolist() == pytest.approx([-2.0, -2.0, -2.0, -4.0])
    characters = align_logprobs(text, ids(text, across), [-1.0, -2.0, -6.0, -4.0], across, single, anchor="char")
    # A5 is a third of 日, E6 9C two thirds of 本: the token gives 日 1/3 and 本 2/3
    assert characters.logprobs.tolist() == pytest.approx([-5.0, -8 / 3, -8 / 3, -8 / 3])


def test_cjk_text_is_aligned_by_characters_unless_unit_is_word() -> None:
    text = "a日b"
    trace = [-1.0, -2.0, -3.0, -4.0, -5.0]
    auto = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, CHARACTERS, anchor="word")
    assert auto.logprobs.tolist() == pytest.approx([-1.0, -3.0, -3.0, -3.0, -5.0])
    word = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, CHARACTERS, anchor="word", unit="word")
    assert word.logprobs.tolist() == pytest.approx([-3.0] * 5)


def test_lone_leading_metaspace_joins_the_next_token() -> None:
    tokenizer = sentencepiece_like()
    metaspace = tokenizer.convert_tokens_to_ids("▁")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "so"]
    sampled = [metaspace, *letters]  # as encoded; a plain decode drops the space
    assert token_offsets(sampled, tokenizer, "so").tolist() == [[0, 0], [0, 1], [1, 2]]
    assert token_offsets(sampled, tokenizer, " so").tolist() == [[0, 1], [1, 2], [2, 3]]
    span = align_logprobs("so", sampled, [-1.0, -2.0, -4.0], tokenizer, CHARACTERS, anchor="span")
    assert span.logprobs.tolist() == [-3.0, -4.0]
    word = align_logprobs("so", sampled, [-1.0, -2.0, -4.0], tokenizer, CHARACTERS, anchor="word")
    assert word.logprobs.tolist() == [-3.5, -3.5]
    reverse = align_logprobs("so", ids("so", CHARACTERS), [-2.0, -4.0], CHARACTERS, tokenizer, target_ids=sampled)
    assert reverse.logprobs.tolist() == [-1.0, -1.0, -4.0]
    same = align_logprobs("so", sampled, [-1.0, -2.0, -4.0], tokenizer, tokenizer, target_ids=sampled)
    assert same.logprobs.tolist() == [-1.0, -2.0, -4.0]


def test_special_tokens_inside_a_response() -> None:
    """They are not aligned unless the target has the same one at the same byte; EOS maps to EOS."""
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


def test_additional_eos_id_ends_the_response() -> None:
    tokenizer = sentencepiece_like()
    sampled = [*ids("so", tokenizer), tokenizer.bos_token_id]
    trace = [-1.0] * len(sampled)
    truncated = align_logprobs("so", sampled, trace, tokenizer, CHARACTERS)
    assert truncated.target_ids == ids("so", CHARACTERS)
    assert truncated.residual == -1.0
    ended = align_logprobs("so", sampled, trace, tokenizer, CHARACTERS, source_eos_ids={tokenizer.bos_token_id})
    assert ended.target_ids == (*ids("so", CHARACTERS), CHARACTERS.eos_token_id)
    assert ended.residual == 0.0


def test_repeated_special_tokens_at_one_position_align_in_order() -> None:
    start = sentencepiece_like().bos_token_id
    tokenizer = sentencepiece_like()
    sampled = [*ids("so", tokenizer), start, start]
    trace = [-float(i + 1) for i in range(len(sampled))]
    same = align_logprobs("so", sampled, trace, tokenizer, tokenizer, target_ids=sampled)
    assert same.logprobs.tolist() == trace


def test_eos_id_that_is_not_a_special_token_ends_the_response() -> None:
    tokenizer = byte_bpe()
    tokenizer.add_tokens(["<end>"])
    end = tokenizer.convert_tokens_to_ids("<end>")
    sampled = [*ids("ab", CHARACTERS), end]
    aligned = align_logprobs("ab", sampled, [-1.0, -2.0, -4.0], tokenizer, MERGED, source_eos_ids={end})
    assert aligned.target_ids == (*ids("ab", MERGED), MERGED.eos_token_id)
    assert aligned.logprobs.tolist() == [-3.0, -4.0]


def test_equal_ids_of_an_empty_text_give_the_identity() -> None:
    tokenizer = sentencepiece_like()
    metaspace = tokenizer.convert_tokens_to_ids("▁")
    same = align_logprobs("", [metaspace], [-2.0], tokenizer, tokenizer, target_ids=[metaspace])
    assert same.logprobs.tolist() == [-2.0]
    unaligned = align_logprobs("", [metaspace], [-2.0], tokenizer, CHARACTERS)
    assert (unaligned.residual, unaligned.mismatched) == (-2.0, 1)


def test_eos_on_one_side_only_is_not_aligned() -> None:
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


def test_invalid_utf8_becomes_replacement_characters() -> None:
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


def test_each_invalid_byte_token_becomes_a_replacement_character() -> None:
    tokenizer = unigram()
    sampled = [tokenizer.convert_tokens_to_ids(piece) for piece in ("s", "<0xE6>", "<0x97>", "o")]
    text = decode_completion(sampled, tokenizer)
    assert text == "s\ufffd\ufffdo"
    assert token_offsets(sampled, tokenizer).tolist() == [[0, 1], [1, 4], [4, 7], [7, 8]]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from("aAsSiItT o.\n"), max_size=40), loops=st.integers(1, 60))
@example(text="so It is", loops=1)
@example(text="number wAS a time it is", loops=1)
@example(text="was USA as well", loops=1)
@example(text=" the cat", loops=300)
def test_lowercased_text_is_masked_and_counted_and_the_rest_is_exact(text: str, loops: int) -> None:
    """The source has one token per character and lowercasing keeps their number, so each target token's exact value is
    known."""
    target = sentencepiece_like("Lowercase")
    text = "A" + text * loops + "C"
    trace = [-float(1 + i % 7) for i in range(len(text))]
    aligned = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, target)
    assert not aligned.exact
    start, lost, mismatched = 0, 0.0, 0
    for token, value, covered in zip(aligned.target_ids, aligned.logprobs, aligned.covered, strict=True):
        stop = start + len(independent_bytes(token, target))
        unchanged = text[start:stop] == text[start:stop].lower()
        assert covered == unchanged
        if unchanged:
            assert value == pytest.approx(sum(trace[start:stop]))
        else:
            lost += sum(trace[start:stop])
            mismatched += stop - start
        start = stop
    assert aligned.residual == pytest.approx(lost)
    assert aligned.mismatched == mismatched


def test_changed_word_is_masked_and_its_neighbours_are_exact() -> None:
    lower = sentencepiece_like("Lowercase")
    text = "was USA as well"
    trace = [-float(i + 1) for i in range(len(text))]
    aligned = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, lower, anchor="word")
    assert aligned.residual == pytest.approx(sum(trace[3:7]))
    assert aligned.mismatched == 4
    start = 0
    for token, covered in zip(aligned.target_ids, aligned.covered, strict=True):
        assert covered == (not 3 <= start < 7)
        start += len(independent_bytes(token, lower))


def test_text_added_by_a_tokenizer_is_masked_although_nothing_is_lost() -> None:
    doubling = sentencepiece_like("Doubled")  # t becomes tt
    text = "so it is"
    trace = [-1.0] * len(text)
    aligned = align_logprobs(text, ids(text, CHARACTERS), trace, CHARACTERS, doubling)
    pieces = [independent_bytes(i, doubling).decode() for i in aligned.target_ids]
    assert "".join(pieces) == "so itt is"
    assert not aligned.exact
    assert not aligned.covered.all()
    assert all("t" in piece for piece, covered in zip(pieces, aligned.covered, strict=True) if not covered)


def test_token_that_contains_added_text_masks_its_group() -> None:
    """`so it` becomes `so x it`, and one token contains the o and the x: the mass of s in the source's `so` is
    unknown."""
    source, target = byte_bpe("s·o"), byte_bpe("o·Ġ", "oĠ·x")
    target.backend_tokenizer.normalizer = normalizers.Replace(" i", " x i")
    pieces = [independent_bytes(i, target).decode() for i in retokenize("so it", target).ids]
    assert pieces == ["s", "o x", " ", "i", "t"]
    aligned = align_logprobs("so it", ids("so it", source), [-1.0, -2.0, -4.0, -8.0], source, target, anchor="span")
    assert nan_equal(aligned.logprobs, [None, None, None, -4.0, -8.0])  # the space was added; i and t are intact
    assert (aligned.residual, aligned.mismatched) == (-3.0, 2)
    word = align_logprobs("so it", ids("so it", source), [-1.0, -2.0, -4.0, -8.0], source, target, anchor="word")
    assert not word.covered[:2].any()


def test_target_ids_may_be_the_retokenized_ids_of_a_changed_text() -> None:
    lower = sentencepiece_like("Lowercase")
    text = "so It is"
    source = [*ids(text, CHARACTERS), CHARACTERS.eos_token_id]
    trace = [-float(i + 1) for i in range(len(source))]
    for ended in (True, False):
        retokenized = retokenize(text, lower, ended=ended).ids
        explicit = align_logprobs(
            text, source[: 8 + ended], trace[: 8 + ended], CHARACTERS, lower, target_ids=retokenized
        )
        default = align_logprobs(text, source[: 8 + ended], trace[: 8 + ended], CHARACTERS, lower)
        assert explicit.target_ids == default.target_ids == retokenized
        assert np.array_equal(explicit.logprobs, default.logprobs, equal_nan=True)
        assert explicit.residual == default.residual


def test_sampled_unknown_token_is_not_aligned_to_a_character() -> None:
    source, target = sentencepiece_like(), synthetic("unigram-unk")
    sampled = [*ids("time", source), source.unk_token_id, *ids("日", source), *ids(" once", source)]
    trace = [-9.0 if i == source.unk_token_id else -1.0 for i in sampled]
    aligned = align_logprobs(decode_completion(sampled, source), sampled, trace, source, target)
    assert not aligned.covered[aligned.target_ids.index(target.unk_token_id)]
    assert aligned.residual <= -9.0


def test_unknown_characters_are_masked_and_counted() -> None:
    target = synthetic("unigram-unk")
    text = "time 日 once"
    source_ids = ids(text, CHARACTERS)
    trace = [-1.0] * len(source_ids)
    aligned = align_logprobs(text, source_ids, trace, CHARACTERS, target)
    assert not aligned.exact
    unknown = aligned.target_ids.index(target.unk_token_id)
    assert not aligned.covered[unknown]
    assert aligned.residual == pytest.approx(float(len(source_ids) * -1.0 - np.nansum(aligned.logprobs)))
    assert -6.0 <= aligned.residual <= -3.0  # the three bytes, plus adjacent whitespace in the same token


def test_clipped_mass_moves_to_the_residual() -> None:
    aligned = align_logprobs("abc", ids("abc", CHARACTERS), [-60.0, -1.0, -2.0], CHARACTERS, MERGED)
    assert aligned.logprobs.tolist() == [-53.0]
    assert (aligned.clipped, aligned.residual, aligned.mismatched) == (-10.0, -10.0, 0)
    unclipped = align_logprobs("abc", ids("abc", CHARACTERS), [-60.0, -1.0, -2.0], CHARACTERS, MERGED, bound=100.0)
    assert unclipped.logprobs.tolist() == [-63.0]
    infinite = align_logprobs("abc", ids("abc", CHARACTERS), [-np.inf, -1.0, -2.0], CHARACTERS, MERGED)
    assert infinite.logprobs.tolist() == [-53.0]
    assert infinite.residual == -np.inf


def test_behaviour_logprobs_of_a_batch_are_the_learners_where_uncovered() -> None:
    import torch

    text = "ab"
    batch = align_batch(
        [text, "a"],
        [ids(text, CHARACTERS), ids("a", CHARACTERS)],
        [[-1.0, -2.0], [-4.0]],
        CHARACTERS,
        MERGED,
        target_ids=[[*ids(text, MERGED), MERGED.eos_token_id], ids("a", MERGED)],
    )
    assert batch.covered.tolist() == [[True, False], [True, False]]
    assert batch.tokens.tolist() == [[True, True], [True, False]]
    assert batch.uncovered.tolist() == [1, 0]
    learner_logprobs = torch.full((2, 2), -0.5, requires_grad=True)
    behaviour = batch.behaviour(learner_logprobs)
    assert behaviour.tolist() == [[-3.0, -0.5], [-4.0, -0.5]]
    assert not behaviour.requires_grad
    with pytest.raises(ValueError, match=r"shape \(1, 2\), expected \(2, 2\)"):
        batch.behaviour(torch.zeros(1, 2))


def test_tokens_added_after_first_use_are_recognized() -> None:
    tokenizer = byte_bpe()
    assert token_offsets(ids("ab", tokenizer), tokenizer).tolist() == [[0, 1], [1, 2]]
    tokenizer.add_tokens(["ab"])
    assert token_offsets(ids("ab", tokenizer), tokenizer).tolist() == [[0, 2]]


def test_token_that_becomes_special_is_not_decoded() -> None:
    tokenizer = byte_bpe()
    sampled = ids("ab", tokenizer)
    assert decode_completion(sampled, tokenizer) == "ab"
    tokenizer.eos_token = "b"
    assert decode_completion(sampled, tokenizer) == "a"


def test_metaspace_decoder_strips_the_leading_space_of_the_first_token() -> None:
    tokenizer = unigram(byte_fallback=False)
    encoded = tokenizer.encode("time", add_special_tokens=False)
    assert independent_bytes(encoded[0], tokenizer)[:1] == b" "
    assert token_offsets(encoded, tokenizer, "time")[-1, 1] == 4
    assert align_logprobs("time", encoded, [-1.0] * len(encoded), tokenizer, CHARACTERS).residual == 0.0


def test_multi_unit_token_without_a_target_is_one_mismatched_token() -> None:
    target = synthetic("unigram-unk")
    source = byte_bpe("æ·Ĺ", "æĹ·¥", "æĹ¥·æ", "æĹ¥æ·ľ", "æĹ¥æľ·¬")
    assert len(ids("日本", source)) == 1
    for anchor in ("span", "word", "char"):
        aligned = align_logprobs("日本", ids("日本", source), [-4.0], source, target, anchor=anchor)
        assert (aligned.residual, aligned.mismatched) == (-4.0, 1)
