"""Text across vocabularies: a peer's sampled ids to text, text to the learner's ids.

Source: paper, Section "Tokenizer Heterogeneity Layer", text adaptation: decode the peer response, encode it with
the learner's tokenizer, append it to the learner's own prompt tokens. Three things go wrong when that is
done naively, and are taken care of here: a SentencePiece completion decoded alone loses its first space; a
text that spells a control token must not become one; a truncated response must not be given an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from mutualrl.errors import TokenizerError
from mutualrl.thl.offsets import utf8
from mutualrl.thl.table import control_ids, known_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What stands before a text so that it is seen in a context: the first merges with hardly anything but line breaks,
# the second not with those.
_ANCHORS = ("\n", "x")


@dataclass(frozen=True, slots=True)
class Retokenized:
    """Text in the learner's vocabulary, and what is lost on the way there.

    `ids` are the text's tokens, with the end-of-sequence token last exactly when the response had ended. Nothing is
    ever cut. `retokenized`: the text that `ids` decode to in a completion. `exact`: it is the text itself. `excess`:
    tokens beyond the limit, the end included. `unknown`: tokens that stand for what the vocabulary lacks (<unk>).
    """

    ids: tuple[int, ...]
    retokenized: str
    exact: bool
    excess: int = 0
    unknown: int = 0

    @property
    def fits(self) -> bool:
        """Return whether all tokens are within the limit."""
        return self.excess == 0

    @property
    def lost(self) -> str:
        """Return what is lost, as text; empty when nothing is."""
        return "; ".join(
            text
            for text, true in (
                (f"{self.unknown} tokens stand for characters that the vocabulary lacks", self.unknown > 0),
                ("the tokenizer changes the text", not self.exact and self.unknown == 0),
                (f"{self.excess} tokens are beyond the limit", self.excess > 0),
            )
            if true
        )


def decode_completion(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return text of sampled completion ids, special tokens left out, as it reads after a prompt.

    Decoding happens behind an anchor: alone, a SentencePiece completion would lose its first space.
    Invalid byte sequences become U+FFFD, as everywhere in transformers.
    """
    table = known_table(tokenizer)
    special = control_ids(tokenizer) if table is None else table.names.keys()
    ids = [i for i in token_ids if i not in special]
    anchor, alone = _anchor(tokenizer, _ANCHORS[0])
    joined = _decode([*anchor, *ids], tokenizer)
    return joined[len(alone) :] if joined.startswith(alone) else _decode(ids, tokenizer)


def ended(token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> bool:
    """Return whether a sampled completion closed with an end-of-sequence token (else it was truncated)."""
    return bool(token_ids) and token_ids[-1] in eos_token_ids


def retokenize(
    text: str, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None, *, ended: bool = False
) -> Retokenized:
    """Return `text` as the learner's tokens, to stand after the learner's prompt tokens.

    Control tokens spelled out in the text stay text (or `exact` is false). The end-of-sequence token is appended when
    `ended` and only then. `max_length` counts all tokens; what is beyond it is counted in the result, not cut.

    Raises TextMismatchError for a lone surrogate, TokenizerError when `ended` and the tokenizer has no end of sequence.
    """
    utf8(text)
    ids, exact = encode_in_context(text, tokenizer)
    retokenized = text if exact else decode_completion(ids, tokenizer)
    unknown = 0 if exact or tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if ended:
        ids = [*ids, end_id(tokenizer)]
    excess = 0 if max_length is None else max(0, len(ids) - max_length)
    return Retokenized(tuple(ids), retokenized, exact, excess, unknown)


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of a tokenizer's end-of-sequence token. Raises TokenizerError when it has none."""
    if tokenizer.eos_token_id is None:
        raise TokenizerError(
            f"tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token; set tokenizer.eos_token"
        )
    return int(tokenizer.eos_token_id)


def encode_in_context(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], bool]:
    """Return ids of `text` as a continuation, and whether they decode to it.

    A tokenizer that puts a space before every text (SentencePiece) is shown the text behind an anchor. One that has its
    control tokens among its pieces (Unigram) is shown a text that spells one in two parts.
    """
    ids = _encode(text, tokenizer)
    if _carries(ids, text, tokenizer):
        return ids, True
    candidates = list(_behind_anchors(text, tokenizer))
    for behind in candidates:
        if _carries(behind, text, tokenizer):
            return behind, True
    parts = _cut_controls(text, ids, tokenizer)
    if len(parts) > 1:
        joined = [token for part in parts for token in encode_in_context(part, tokenizer)[0]]
        return joined, _carries(joined, text, tokenizer)
    if candidates and decode_completion(ids, tokenizer)[:1] == " " != text[:1]:
        return candidates[0], False
    return ids, False


def _behind_anchors(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield ids of `text` as they come out behind each anchor that stays a token of its own there."""
    for anchor in _ANCHORS:
        before, _ = _anchor(tokenizer, anchor)
        behind = _encode(anchor + text, tokenizer)
        if behind[: len(before)] == list(before):
            yield behind[len(before) :]


def _cut_controls(text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return `text` cut behind the first character of every control token that it spells and that `ids` have for
    real."""
    table = known_table(tokenizer)
    names = set() if table is None else {table.names[i] for i in ids if i in table.names and len(table.names[i]) > 1}
    spelled = re.compile("|".join(map(re.escape, sorted(names)))) if names else None
    cuts = [0, *(m.start() + 1 for m in spelled.finditer(text))] if spelled else [0]
    return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


def _carries(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `decode_completion` of `ids` is `text`: by the token table, or the decoder itself where there
    is none."""
    table = known_table(tokenizer)
    if table is None:
        return decode_completion(ids, tokenizer) == text
    return table.raw(ids) == text.encode()


@lru_cache(maxsize=64)
def _anchor(tokenizer: PreTrainedTokenizerBase, anchor: str) -> tuple[tuple[int, ...], str]:
    """Return an anchor's ids, and the text they decode to; the same for a tokenizer's whole life."""
    ids = _encode(anchor, tokenizer)
    return tuple(ids), _decode(ids, tokenizer)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return ids of `text`, nothing added, control tokens spelled in it split like any text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids: list[int]
    if backend is None or backend.truncation is not None or backend.padding is not None:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids
    # The same without the character offsets, which are not needed here and cost a third of the time.
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    finally:
        backend.encode_special_tokens = before
    return ids


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
