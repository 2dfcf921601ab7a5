"""Byte offsets of tokens in a text, computed from the sampled ids, never by re-encoding."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mutualrl.errors import TextMismatchError
from mutualrl.thl.decoders import FIRST_TOKEN
from mutualrl.thl.table import Ints, TokenTable, table_of
from mutualrl.thl.words import byte_positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Bools = npt.NDArray[np.bool_]

_UNITS = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Byte spans of one side's n tokens in a text of N UTF-8 bytes.

    `ends`, shape (n,), monotone: the byte where each token ends; a control token ends where its predecessor does.
    `control`, shape (n,): tokens that are not text, or None when there are none.
    `changed`, shape (n,): tokens whose bytes differ from the text's, or None when the tokens encode the text exactly.
    `lost`, shape (N,): bytes of the text that no token covers, or None likewise.
    """

    ends: Ints
    control: Bools | None = None
    changed: Bools | None = None
    lost: Bools | None = None
    #: every token covers at least one byte
    all_text: bool = False

    @property
    def starts(self) -> Ints:
        """Return the byte where each token starts, shape (n,)."""
        return np.concatenate((np.zeros(1, dtype=np.int64), self.ends[:-1]))[: len(self.ends)]


def utf8(text: str) -> bytes:
    """Return `text` as UTF-8. Raises TextMismatchError for a lone surrogate, which no tokenizer accepts."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TextMismatchError(
            f"the text has a lone surrogate at character {error.start}, expected Unicode text"
        ) from None


def token_offsets(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, text: str | None = None) -> Ints:
    """Return the UTF-8 byte interval `[start, end)` of every token, shape (n, 2), for any ids, canonical or not.

    The intervals partition `text` (by default: the text that the ids decode to in a completion). A token that is part
    of a character covers its bytes of it; a control token covers none. Invalid UTF-8 decodes to U+FFFD: the token that
    completes the invalid sequence covers U+FFFD, the tokens before cover none of it.

    Raises TokenError for an id outside the vocabulary, TextMismatchError when the ids do not decode to `text`,
    TokenizerError for a slow tokenizer or an unknown decoder.
    """
    table = table_of(tokenizer)
    array = table.check(ids)
    data = table.read(array)[0] if text is None else utf8(text)
    placed = locate_tokens(array, table, data)
    return np.stack((placed.starts, placed.ends), axis=1)


def locate_tokens(ids: Ints, table: TokenTable, data: bytes) -> TokenSpans:
    """Place tokens on the text `data` that they decode to, with or without the space that some decoders strip.

    Raises TextMismatchError when they decode to another text.
    """
    lengths = table.lengths[ids]
    all_text = bool(lengths.all())  # no control token, no token without bytes
    control = None if all_text else table.control[ids]
    control = control if control is not None and control.any() else None
    if table.raw(ids.tolist()) == data:
        return TokenSpans(lengths.cumsum(dtype=np.int64), control, all_text=all_text)
    decoded, ends = table.read(ids)
    stripped = len(decoded) - len(data)
    if decoded == data:
        return TokenSpans(ends, control)
    if 0 < stripped <= _strippable(table, ids) and decoded == b" " * stripped + data:
        return TokenSpans(np.maximum(ends - stripped, 0), control)
    raise TextMismatchError(_difference(decoded, data))


def _strippable(table: TokenTable, ids: Ints) -> int:
    """Return how many leading spaces the decoder may strip from the text of `ids`."""
    if table.strips != FIRST_TOKEN:
        return table.strips
    first = next((piece for i in ids.tolist() if (piece := table.pieces[i])), b"")
    return len(first) - len(first.lstrip(b" "))


def _difference(decoded: bytes, data: bytes) -> str:
    found, expected = decoded.decode(), data.decode()
    start = _common_prefix(found, expected)
    return (
        f"the ids do not decode to the text: at character {start} they give {found[start : start + 20]!r}, "
        f"expected {expected[start : start + 20]!r} (decode sampled ids with thl.decode_completion; encode with "
        "thl.retokenize)"
    )


def locate_any(ids: Ints, table: TokenTable, data: bytes) -> TokenSpans:
    """Place a tokenizer's tokens of the text `data`, whether or not they encode it exactly."""
    try:
        return locate_tokens(ids, table, data)
    except TextMismatchError:
        return locate_changed(ids, table, data)


def locate_changed(ids: Ints, table: TokenTable, data: bytes) -> TokenSpans:
    """Place the tokens of a tokenizer that changed the text: unchanged bytes keep their position, others are marked.

    A token is `changed` unless all its bytes are in the text; a byte of the text is `lost` unless a token has it.
    Bytes that replace lost bytes extend to the next unchanged byte; dropped bytes belong to the token after them.
    Texts are compared word by word, and by character within a word whose length is unchanged.
    """
    decoded, ends = table.read(ids)
    origin = _origins(decoded, data)  # of each decoded byte: its byte in the text, or -1
    intact = origin >= 0
    reached = np.concatenate(([0], np.maximum.accumulate(np.where(intact, origin + 1, 0))))
    following = np.append(origin, len(data))
    after_change = np.concatenate(([False], ~intact))
    closed = (following >= 0) & after_change  # and before an unchanged byte or the end
    positions = np.where(closed, following, reached)
    starts = np.concatenate(([0], ends[:-1]))[: len(ends)]
    changes = np.concatenate(([0], np.cumsum(~intact)))
    intact_spans = (changes[ends] == changes[starts]) & (ends > starts)
    control = table.control[ids]
    lost = np.ones(len(data), dtype=np.bool_)
    lost[origin[intact]] = False
    return TokenSpans(positions[ends], control if control.any() else None, ~intact_spans & ~control, lost)


def _origins(decoded: bytes, data: bytes) -> Ints:
    """Return the byte of `data` that each byte of `decoded` comes from, or -1 where it was changed."""
    origin = np.full(len(decoded), -1, dtype=np.int64)
    found, expected = decoded.decode(), data.decode()
    found_bytes = byte_positions(found, decoded, list(range(len(found) + 1)))
    expected_bytes = byte_positions(expected, data, list(range(len(expected) + 1)))
    for i, j, size in _equal_passages(found, expected):
        a, a_stop, b = found_bytes[i], found_bytes[i + size], expected_bytes[j]
        origin[a:a_stop] = np.arange(b, b + a_stop - a)
    return origin


def _equal_passages(found: str, expected: str) -> Iterator[tuple[int, int, int]]:
    """Yield passages that two texts share, in order, as (start in one, start in the other, characters).

    The common prefix and suffix are removed first, and frequent words start no match in between, so that a long
    text of few distinct words does not take quadratic time.
    """
    head = _common_prefix(found, expected)
    tail = _common_prefix(found[head:][::-1], expected[head:][::-1])
    if head:
        yield 0, 0, head
    middle, other = found[head : len(found) - tail], expected[head : len(expected) - tail]
    yield from ((head + i, head + j, size) for i, j, size in _by_word(middle, other))
    if tail:
        yield len(found) - tail, len(expected) - tail, tail


def _common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _by_word(found: str, expected: str) -> Iterator[tuple[int, int, int]]:
    words, other = _UNITS.findall(found), _UNITS.findall(expected)
    edges, other_edges = [0, *accumulate(map(len, words))], [0, *accumulate(map(len, other))]
    for tag, i, i_end, j, j_end in _opcodes(words, other):
        a, a_end, b, b_end = edges[i], edges[i_end], other_edges[j], other_edges[j_end]
        if tag == "equal":
            yield a, b, a_end - a
        elif a_end - a == b_end - b:  # equal lengths: characters correspond one to one; else the mapping is unknown
            yield from ((a + n, b + n, 1) for n in range(a_end - a) if found[a + n] == expected[b + n])


def _opcodes(words: Sequence[str], other: Sequence[str]) -> Iterable[tuple[str, int, int, int, int]]:
    """Return difflib's opcodes; for equally many words, compare them pairwise: none was joined or split."""
    if len(words) == len(other):
        return [
            ("equal" if a == b else "replace", n, n + 1, n, n + 1)
            for n, (a, b) in enumerate(zip(words, other, strict=True))
        ]
    return difflib.SequenceMatcher(None, words, other).get_opcodes()
