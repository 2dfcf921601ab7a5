from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mutualrl.thl import Decoder, decode_completion, end_token, ended, retokenize
from thl_tokenizers import CORPUS, REAL, SYNTHETIC, byte_bpe, real, sentencepiece_like, synthetic

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("name", SYNTHETIC)
@settings(max_examples=150, deadline=None)
@given(text=any_text)
@example(text=" a leading blank")
@example(text="  two")
@example(text="\n\nlines\r\n")
@example(text="日本語 نص ไทย हिन्दी 👩‍👩‍👧 é")
@example(text="")
@example(text="   ")
def test_text_survives_retokenization(name: str, text: str) -> None:
    tokenizer = synthetic(name)
    retokenized = retokenize(text, tokenizer, ended=False)
    assert retokenized.exact == (decode_completion(retokenized.ids, tokenizer) == text)
    assert retokenized.exact


@pytest.mark.parametrize("name", SYNTHETIC)
def test_completions_are_decoded_together_as_one_by_one(name: str) -> None:
    """Also by a decoder for another thread; ids of half a character do not begin with the anchor's text everywhere."""
    tokenizer = synthetic(name)
    rows = [retokenize(text, tokenizer, ended=True).ids for text in (*CORPUS, " a", "", "\u00e9\U0001f642")]
    rows += [row[1:] for row in rows] + [row[:-2] for row in rows]
    decoder = Decoder.of(tokenizer)
    expected = [decode_completion(row, tokenizer) for row in rows]
    assert decoder.decode(rows) == decoder.copied().decode(rows) == expected
    assert decoder.copied().tokenizer is not tokenizer


@pytest.mark.parametrize("name", SYNTHETIC)
@given(text=any_text)
@settings(max_examples=50, deadline=None)
def test_eos_is_appended_to_ended_responses_only(name: str, text: str) -> None:
    tokenizer = synthetic(name)
    complete, truncated = retokenize(text, tokenizer, ended=True), retokenize(text, tokenizer, ended=False)
    assert complete.ids == (*truncated.ids, tokenizer.eos_token_id)
    assert tokenizer.eos_token_id not in truncated.ids


@pytest.mark.parametrize("source", SYNTHETIC)
@pytest.mark.parametrize("target", SYNTHETIC)
def test_sampled_ids_reach_the_learner_as_the_same_text(source: str, target: str) -> None:
    """Sampled ids often differ from the canonical tokenization of their text; here, they encode three characters at a
    time."""
    peer, learner = synthetic(source), synthetic(target)
    for sentence in ("So \\boxed{42} it is", *CORPUS[:2]):
        ids: list[int] = []
        for piece in [sentence[i : i + 3] for i in range(0, len(sentence), 3)]:
            ids += retokenize(piece, peer, ended=False).ids
        if "boxed{42} it" in sentence:
            assert ids != list(retokenize(sentence, peer, ended=False).ids)
        text = decode_completion(ids, peer)
        assert text == sentence
        assert decode_completion(retokenize(text, learner, ended=True).ids, learner) == sentence


@pytest.mark.parametrize("name", SYNTHETIC)
def test_spelled_out_control_tokens_stay_text(name: str) -> None:
    tokenizer = synthetic(name)
    text = f"before {tokenizer.eos_token} after {tokenizer.pad_token}"
    retokenized = retokenize(text, tokenizer, ended=False)
    assert not set(retokenized.ids) & set(tokenizer.all_special_ids)
    assert retokenized.exact
    assert retokenized.lost == ""


def test_tokenizer_that_cannot_spell_its_control_token_is_inexact() -> None:
    """The bracket becomes <unk>: the text is wrong, but contains no real EOS."""
    tokenizer = synthetic("unigram-unk")
    for text in ("so</s>", "so</s>it", "</s>", "</s></s>"):
        retokenized = retokenize(text, tokenizer)
        assert tokenizer.eos_token_id not in retokenized.ids
        assert not retokenized.exact


def test_newlines_survive_a_tokenizer_that_prepends_a_space() -> None:
    tokenizer = byte_bpe("Ċ·Ċ", add_prefix_space=True)
    for text in ("\n\nab", "\nab", "ab", " ab", "\n"):
        assert retokenize(text, tokenizer).exact, text


def test_max_length_counts_eos_and_does_not_truncate() -> None:
    tokenizer = synthetic("ada")
    length = len(retokenize("12 34", tokenizer, ended=True).ids)
    assert retokenize("12 34", tokenizer, ended=True, max_length=length).fits
    short = retokenize("12 34", tokenizer, ended=True, max_length=length - 1)
    assert not short.fits
    assert short.excess == 1
    assert short.lost == "1 tokens are beyond the limit"
    assert len(short.ids) == length


def test_unknown_characters_are_counted() -> None:
    retokenized = retokenize("time 日本 once", synthetic("unigram-unk"))
    assert not retokenized.exact
    assert retokenized.unknown == 1
    assert retokenized.retokenized == "time  once"
    assert retokenized.lost == "1 tokens stand for characters that the vocabulary lacks"


def test_tokenizer_that_changes_text_is_inexact() -> None:
    assert not retokenize("Word", sentencepiece_like("Lowercase"), ended=False).exact
    assert retokenize("word", sentencepiece_like("Lowercase"), ended=False).exact


def test_sentencepiece_completion_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode("a time", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a time"  # a plain decode loses the leading space
    assert decode_completion(ids, tokenizer) == " a time"


def test_ended_checks_the_last_sampled_id() -> None:
    assert ended([5, 2], [2, 9])
    assert ended([9], [2, 9])
    assert not ended([2, 5], [2])
    assert not ended([], [2])


def test_special_tokens_are_not_decoded() -> None:
    tokenizer = synthetic("bob")
    ids = [*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]
    assert decode_completion(ids, tokenizer) == "12"


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_preserve_math_solutions(real_data: Path, name: str) -> None:
    tokenizer = real(name)
    lines = (real_data / "math" / "math500.jsonl").read_text().splitlines()[:100]
    for text in [json.loads(line)["solution"] for line in lines] + [
        "<|im_end|> </s> <|eot_id|>",
        " x",
        "日本語 👩‍👩‍👧",
    ]:
        retokenized = retokenize(text, tokenizer, ended=True)
        assert retokenized.exact
        assert retokenized.ids[-1] == tokenizer.eos_token_id
        assert not set(retokenized.ids[:-1]) & set(tokenizer.all_special_ids)


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ 'E' }}{{ '\n' }}{% endfor %}"


def test_end_token_is_the_one_that_the_learner_writes() -> None:
    tokenizer = copy.deepcopy(sentencepiece_like())
    other = tokenizer("E", add_special_tokens=False)["input_ids"][-1]
    eos = tokenizer.eos_token_id
    assert end_token(tokenizer, [eos]) == eos
    assert end_token(tokenizer, [eos, other]) == eos  # no template
    assert end_token(tokenizer, [eos, other], {other: 3, eos: 1}) == other  # its rollouts decide
    assert end_token(tokenizer, [eos, other], {eos: 2, other: 2}) == min(eos, other)
    tokenizer.chat_template = TEMPLATE
    assert end_token(tokenizer, [eos, other]) == other
    assert end_token(tokenizer, [eos]) == eos  # the template's token does not end generation
    assert end_token(tokenizer, [eos, other], {eos: 1}) == eos
    assert retokenize("12", tokenizer, ended=True, end_token_id=other).ids[-1] == other
