"""Text across vocabularies: a peer's sampled ids to text, text to the learner's ids.

Source: paper, Section "Tokenizer Heterogeneity Layer", text adaptation: decode the peer response, encode it with
the learner's tokenizer, append it to the learner's own prompt tokens. Three things go wrong when that is
done naively, and are taken care of here: a SentencePiece completion decoded alone loses its first blank; a
text that spells a control token must not become one; a truncated response must not be given an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# Something that no tokenizer merges with what follows, so that text can be seen in a context.
_ANCHOR = "\n"


@dataclass(frozen=True, slots=True)
class Retokenized:
    """A text in the learner's vocabulary.

    `ids` are the text's tokens, with the end-of-sequence token last exactly when the response had ended.
    `exact`: decoding `ids` gives the text back. `fits`: all tokens are within the limit, end included;
    nothing is ever cut.
    """

    ids: tuple[int, ...]
    exact: bool
    fits: bool


def decode_completion(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Text of sampled completion ids, special tokens left out, as it reads after a prompt.

    Decoding happens behind an anchor: alone, a SentencePiece completion would lose its first blank.
    Invalid byte sequences become U+FFFD, as everywhere in transformers.
    """
    special = frozenset(tokenizer.all_special_ids)
    ids = [i for i in token_ids if i not in special]
    anchor, alone = _anchor(tokenizer)
    whole = _decode([*anchor, *ids], tokenizer)
    return whole[len(alone) :] if whole.startswith(alone) else _decode(ids, tokenizer)


def ended(token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> bool:
    """Whether a sampled completion closed with an end-of-sequence token (else it was truncated)."""
    return bool(token_ids) and token_ids[-1] in eos_token_ids


def retokenize(text: str, tokenizer: Any, *, ended: bool, max_length: int | None = None) -> Retokenized:
    """`text` as the learner's tokens, to stand after the learner's prompt tokens.

    Control tokens spelled out in the text stay text. The end-of-sequence token is appended when `ended`
    and only then. `max_length` counts all tokens.
    """
    ids, exact = _encode_in_context(text, tokenizer)
    if ended:
        ids = [*ids, tokenizer.eos_token_id]
    return Retokenized(tuple(ids), exact, max_length is None or len(ids) <= max_length)


def _encode_in_context(text: str, tokenizer: Any) -> tuple[list[int], bool]:
    """Ids of `text` as a continuation, and whether they decode to it.

    A tokenizer that puts a blank before every text (SentencePiece) is shown the text behind the anchor.
    """
    ids = _encode(text, tokenizer)
    if decode_completion(ids, tokenizer) == text:
        return ids, True
    anchor, _ = _anchor(tokenizer)
    behind = _encode(_ANCHOR + text, tokenizer)
    if behind[: len(anchor)] == list(anchor):
        rest = behind[len(anchor) :]
        if decode_completion(rest, tokenizer) == text:
            return rest, True
    return ids, False


@lru_cache(maxsize=64)
def _anchor(tokenizer: Any) -> tuple[tuple[int, ...], str]:
    """The anchor's ids, and the text they decode to; the same for a tokenizer's whole life."""
    ids = _encode(_ANCHOR, tokenizer)
    return tuple(ids), _decode(ids, tokenizer)


def _encode(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
