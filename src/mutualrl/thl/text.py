"""Text between vocabularies: a peer's sampled ids to text, text to the learner's ids.

Source: paper, Section "Tokenizer Heterogeneity Layer", text adaptation: decode the peer response, encode it with
the learner's tokenizer, append it to the learner's own prompt tokens. Handles three pitfalls of a naive version: a
SentencePiece completion decoded alone loses its first space; text that spells a control token must not become
one; a truncated response must not get an EOS.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from mutualrl.errors import TokenizerError
from mutualrl.thl.offsets import utf8
from mutualrl.thl.table import TokenIds, control_ids, find_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Prefixes that put a text in context: the first merges with hardly anything but line breaks, the second never with
# line breaks.
_ANCHORS = ("\n", "x")


@dataclass(frozen=True, slots=True)
class Retokenized:
    """Text in the learner's vocabulary, and what was lost in the conversion.

    `ids`: the text's tokens, with EOS last if and only if the response ended; never truncated. `retokenized`: the text
    that `ids` decode to in a completion. `exact`: whether it equals the text. `excess`: number of tokens beyond the
    limit, EOS included. `unknown`: number of unknown tokens (<unk>).
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
        """Return a description of the losses; empty when there are none."""
        losses = []
        if self.unknown > 0:
            losses.append(f"{self.unknown} tokens stand for characters that the vocabulary lacks")
        if not self.exact and self.unknown == 0:
            losses.append("the tokenizer changes the text")
        if self.excess > 0:
            losses.append(f"{self.excess} tokens are beyond the limit")
        return "; ".join(losses)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decoder of sampled completions as they read after a prompt, without special tokens.

    The ids are decoded after an anchor: alone, a SentencePiece completion would lose its first space. Invalid byte
    sequences become U+FFFD, as in transformers. `special`: ids that are left out; `alone`: the text of the anchor.
    """

    tokenizer: PreTrainedTokenizerBase
    special: Collection[int]
    anchor: tuple[int, ...]
    alone: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Decoder:
        """Return a tokenizer's decoder."""
        table = find_table(tokenizer)
        special = control_ids(tokenizer) if table is None else table.names.keys()
        return cls(tokenizer, special, *_anchor(tokenizer, _ANCHORS[0]))

    def copied(self) -> Decoder:
        """Return a decoder for another thread: a tokenizer raises "Already borrowed" where two threads use it."""
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer))

    def decode(self, completions: Iterable[Sequence[int]]) -> list[str]:
        """Return the texts of completions."""
        rows = [[token for token in ids if token not in self.special] for ids in completions]
        texts = _decode_rows([[*self.anchor, *ids] for ids in rows], self.tokenizer)
        changed = [place for place, text in enumerate(texts) if not text.startswith(self.alone)]
        without = dict(zip(changed, _decode_rows([rows[place] for place in changed], self.tokenizer), strict=True))
        return [without.get(place, text[len(self.alone) :]) for place, text in enumerate(texts)]


def decode_completion(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode one completion, as `Decoder`."""
    return Decoder.of(tokenizer).decode([token_ids])[0]


def ended(token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> bool:
    """Return whether a sampled completion ends in an end-of-sequence token (else it was truncated)."""
    return len(token_ids) > 0 and token_ids[-1] in eos_token_ids


def last_tokens(completions: Iterable[tuple[TokenIds | None, bool]]) -> Counter[int]:
    """Count the last tokens of the completions, (ids or None, ended) each, that ended and have any."""
    counts: Counter[int] = Counter()
    for token_ids, done in completions:
        if done and token_ids is not None and len(token_ids):
            counts[int(token_ids[-1])] += 1
    return counts


def end_token(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int], counts: Mapping[int, int] | None = None
) -> int:
    """Return the token that ends the learner's own completions, one of `eos_token_ids` (those that end generation).

    The one that ended most of its rollouts (`counts`, of `last_tokens`); before any, the first that its chat template
    writes after an assistant's message; else the tokenizer's end-of-sequence token. A model may end a turn with another
    token than that (Gemma's <end_of_turn>, Phi's <|end|>), and would never learn to end if taught with it. Raises
    TokenizerError if there is none.
    """
    if counts:
        return max(sorted(counts), key=lambda token: counts[token])
    template_end = _template_end(tokenizer, frozenset(eos_token_ids)) if len(eos_token_ids) > 1 else None
    return end_id(tokenizer) if template_end is None else template_end


_USER, _ANSWER = {"role": "user", "content": "a"}, "7 7 7"


def _template_end(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> int | None:
    """Return the first end token after the answer of a conversation in the chat template; None without a template, or
    for one that cannot be rendered (training prompts that cannot are refused elsewhere)."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text = tokenizer.apply_chat_template([_USER, {"role": "assistant", "content": _ANSWER}], tokenize=False)
    except Exception:  # noqa: BLE001  (a third-party template may raise anything)
        return None
    ids = tokenizer(str(text).rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    return next((int(token) for token in ids if token in eos_token_ids), None)


def retokenize(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    *,
    ended: bool = False,
    end_token_id: int | None = None,
) -> Retokenized:
    """Encode `text` as the learner's tokens, to be appended to the learner's prompt tokens.

    Control tokens spelled out in the text stay text (or `exact` is false). `end_token_id` (see `end_token`; None: the
    tokenizer's EOS) is appended if and only if `ended`. `max_length` counts all tokens; tokens beyond it are counted in
    the result, not truncated.

    Raises TextMismatchError for a lone surrogate, TokenizerError when `ended` and there is no such token.
    """
    ids, exact = encode_in_context(text, tokenizer)
    retokenized = text if exact else decode_completion(ids, tokenizer)
    unknown = 0 if exact or tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if ended:
        ids = [*ids, end_id(tokenizer) if end_token_id is None else end_token_id]
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

    A tokenizer that prepends a space to every text (SentencePiece) gets the text after an anchor. For one that has its
    control tokens among its pieces (Unigram), a text that spells one is split in two.
    """
    utf8(text)
    ids = _encode(text, tokenizer)
    if _is_exact(ids, text, tokenizer):
        return ids, True
    candidates = list(_encode_after_anchors(text, tokenizer))
    for candidate in candidates:
        if _is_exact(candidate, text, tokenizer):
            return candidate, True
    parts = _split_controls(text, ids, tokenizer)
    if len(parts) > 1:
        joined = [token for part in parts for token in encode_in_context(part, tokenizer)[0]]
        return joined, _is_exact(joined, text, tokenizer)
    if candidates and decode_completion(ids, tokenizer)[:1] == " " != text[:1]:
        return candidates[0], False
    return ids, False


def _encode_after_anchors(text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield ids of `text` as encoded after each anchor that does not merge with it."""
    for anchor in _ANCHORS:
        prefix, _ = _anchor(tokenizer, anchor)
        ids = _encode(anchor + text, tokenizer)
        if ids[: len(prefix)] == list(prefix):
            yield ids[len(prefix) :]


def _split_controls(text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Split `text` after the first character of every spelled-out control token that `ids` contain as a control
    token."""
    table = find_table(tokenizer)
    names = set() if table is None else {table.names[i] for i in ids if i in table.names and len(table.names[i]) > 1}
    cuts = [0]
    if names:
        pattern = re.compile("|".join(map(re.escape, sorted(names))))
        cuts += [match.start() + 1 for match in pattern.finditer(text)]
    return [text[a:b] for a, b in pairwise([*cuts, len(text)])]


def _is_exact(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `decode_completion` of `ids` equals `text`, by the token table or, without one, the decoder."""
    table = find_table(tokenizer)
    if table is None:
        return decode_completion(ids, tokenizer) == text
    return table.raw(ids) == text.encode()


@lru_cache(maxsize=64)
def _anchor(tokenizer: PreTrainedTokenizerBase, anchor: str) -> tuple[tuple[int, ...], str]:
    """Return an anchor's ids, and the text they decode to; cached per tokenizer."""
    ids = _encode(anchor, tokenizer)
    return tuple(ids), _decode(ids, tokenizer)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return ids of `text`, without special tokens; control tokens spelled in it are split like any text."""
    return encode_plain([text], tokenizer)[0]


def encode_plain(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return ids of every text without context or special tokens; control tokens spelled in it are split like any text.
    One call of the tokenizer, which may use several cores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation is not None or backend.padding is not None:
        return [tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]
    # The same without character offsets, which are unused here and cost a third of the time.
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    finally:
        backend.encode_special_tokens = before


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return _decode_rows([list(ids)], tokenizer)[0]


def _decode_rows(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if not rows:
        return []
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts
