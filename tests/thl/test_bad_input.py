"""Bad input raises a specific error and never shifts a value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mutualrl.errors import AlignmentError, TextMismatchError, TokenError, TokenizerError, TraceError
from mutualrl.thl import align_batch, align_logprobs, retokenize, token_offsets
from thl_tokenizers import byte_bpe, sentencepiece_like

A, B = byte_bpe("a·b"), byte_bpe()
IDS = list(retokenize("ab c", A).ids)
TRACE = [-1.0, -2.0, -3.0]


def align(
    text: str = "ab c", ids: Any = IDS, trace: Any = TRACE, source: Any = A, target: Any = B, **kwargs: Any
) -> Any:
    return align_logprobs(text, ids, trace, source, target, **kwargs)


def test_lists_and_arrays_are_accepted() -> None:
    assert align().logprobs.tolist() == [-0.5, -0.5, -2.0, -3.0]
    assert align(ids=np.array(IDS), trace=np.array(TRACE, dtype=np.float32)).logprobs.tolist() == [
        -0.5,
        -0.5,
        -2.0,
        -3.0,
    ]


@pytest.mark.parametrize("bad", [-1, 100_000])
def test_token_id_outside_the_vocabulary_is_rejected(bad: int) -> None:
    with pytest.raises(TokenError, match=rf"token id {bad} at position 1 is not in the vocabulary \(ids 0 to 257\)"):
        align(ids=[IDS[0], bad, IDS[2]])
    with pytest.raises(TokenError, match=f"token id {bad} at position 0"):
        align(target_ids=[bad])
    with pytest.raises(TokenError):
        token_offsets([bad], A)


@pytest.mark.parametrize("bad", [[1.5, 2.0, 3.0], ["a", "b", "c"], [[1, 2, 3]], [True, False, True]])
def test_ids_must_be_a_flat_list_of_integers(bad: Any) -> None:
    with pytest.raises(TokenError, match="expected a flat list of integers"):
        align(ids=bad)


@pytest.mark.parametrize("bad", [[], [-1.0, -2.0], [-1.0] * 4, [[-1.0, -2.0, -3.0]], ["a", "b", "c"], [None, 1, [2]]])
def test_trace_must_have_one_number_per_token(bad: Any) -> None:
    with pytest.raises(TraceError, match="log-probs"):
        align(trace=bad)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logprobs_must_be_numbers(bad: float) -> None:
    with pytest.raises(TraceError, match="at position 1, expected a number"):
        align(trace=[-1.0, bad, -3.0])


def test_text_must_match_the_decoded_ids() -> None:
    with pytest.raises(TextMismatchError, match="at character 3 they give 'c', expected 'd'"):
        align(text="ab d")
    with pytest.raises(TextMismatchError, match="at character 4 they give '', expected '!'"):
        align(text="ab c!")
    with pytest.raises(TextMismatchError, match="at character 0"):
        align(target_ids=retokenize("x", B).ids)
    with pytest.raises(TextMismatchError):
        token_offsets(IDS, A, "other")
    pieces = sentencepiece_like()  # its decoder strips one space and nothing else
    with pytest.raises(TextMismatchError, match="at character 0 they give 'xso', expected 'so'"):
        token_offsets(retokenize("xso", pieces).ids, pieces, "so")


def test_lone_surrogate_is_rejected() -> None:
    with pytest.raises(TextMismatchError, match="lone surrogate at character 1"):
        align(text="a\ud800")
    with pytest.raises(TextMismatchError, match="lone surrogate"):
        retokenize("\udc00", A)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"anchor": "sentence"}, "anchor: found 'sentence', expected one of: paper, paper-fallback, word, span, char"),
        ({"unit": "line"}, "unit: found 'line', expected one of: auto, word, char"),
        ({"bound": -5.0}, "bound: found -5.0, expected a number above 0"),
        ({"bound": np.nan}, "bound: found nan, expected a number above 0"),
    ],
)
def test_invalid_option_is_rejected(option: Any, message: str) -> None:
    with pytest.raises(AlignmentError, match=message):
        align(**option)


class Slow:
    """Stand-in for a slow (pure-Python) tokenizer."""

    is_fast = False
    name_or_path = "old-model"
    all_special_ids = ()

    def __len__(self) -> int:
        return 3


def test_slow_tokenizer_is_rejected() -> None:
    with pytest.raises(TokenizerError, match=r"'old-model' is slow \(Slow\), expected a fast one"):
        align(source=Slow())


def test_unsupported_decoder_is_rejected() -> None:
    plain = Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    for decoder in (None, decoders.WordPiece(), decoders.BPEDecoder()):
        if decoder is not None:
            plain.decoder = decoder
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
        with pytest.raises(TokenizerError, match="expected byte-level BPE"):
            align(target=tokenizer)


@pytest.mark.parametrize("step", [decoders.Strip(" ", 1, 0), decoders.Replace("h", "H"), decoders.ByteFallback()])
def test_decoder_step_that_changes_tokens_before_byte_level_is_rejected(step: Any) -> None:
    tokenizer = byte_bpe("<·0", "<0·x", "<0x·4", "<0x4·1", "<0x41·>")  # ByteFallback decodes the last one to "A"
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([step, decoders.ByteLevel()])
    with pytest.raises(TokenizerError, match="after steps that change none of its tokens"):
        token_offsets([1], tokenizer)


def test_decoder_with_a_known_name_but_other_output_is_rejected() -> None:
    class Odd(PreTrainedTokenizerFast):  # type: ignore[misc]
        def decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super().decode(*args, **kwargs)).upper()

    with pytest.raises(TokenizerError, match="decodes its tokens in an unknown way"):
        token_offsets([1], Odd(tokenizer_object=A.backend_tokenizer))


def test_eos_token_is_required_only_for_ended_responses() -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=B.backend_tokenizer)
    assert align(target=endless).covered.all()
    with pytest.raises(TokenizerError, match="no end-of-sequence token"):
        align(ids=[*IDS, A.eos_token_id], trace=[*TRACE, -1.0], target=endless)


def test_batch_errors_name_the_row_and_the_argument() -> None:
    with pytest.raises(TraceError) as caught:
        align_batch(["ab c", "ab c"], [IDS, IDS], [TRACE, [-1.0]], A, B)
    assert caught.value.__notes__ == ["in row 1 of the batch"]
    with pytest.raises(TraceError, match="source_ids: 1 rows for 2 texts"):
        align_batch(["a", "b"], [IDS], [TRACE, TRACE], A, B)
    with pytest.raises(TraceError, match=r"log-probs of shape \(1,\) for 4 ids") as caught:
        align_batch(["ab c", "ab c"], [IDS] * 2, [TRACE] * 2, A, B, own_logprobs=[[-1.0] * 4, [-1.0]])
    assert caught.value.__notes__ == ["in row 1 of the batch"]


def test_empty_batch_and_empty_response() -> None:
    assert align_batch([], [], [], A, B).logprobs.shape == (0, 0)
    empty = align("", [], [])
    assert (empty.target_ids, empty.residual, empty.groups) == ((), 0.0, ())
    batch = align_batch(["", "ab c"], [[], IDS], [[], TRACE], A, B)
    assert batch.tokens.sum(axis=1).tolist() == [0, 4]


def test_truncation_settings_of_the_tokenizer_are_ignored() -> None:
    tokenizer = sentencepiece_like()
    full = retokenize("Once upon a time", tokenizer).ids
    tokenizer("Once upon a time", truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert retokenize("Once upon a time", tokenizer).ids == full
