"""Byte offsets of tokens in a text: intervals worked out from the ids that were sampled, never by encoding again."""

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
    """N tokens of one side on a text of N UTF-8 bytes.

    `ends`, shape (n,), monotone: the byte where each token ends; a control token ends where the one before it does.
    `control`, shape (n,): tokens that are no text, or None when there are none.
    `changed`, shape (n,): tokens whose bytes are not the text's own, or None when the tokens carry the text exactly.
    `lost`, shape (N,): bytes of the text that no token carries, or None likewise.
    """

    ends: Ints
    control: Bools | None = None
    changed: Bools | None = None
    lost: Bools | None = None
    #: every token covers some byte
    all_text: bool = False

    @property
    def starts(self) -> Ints:
        """Return the byte where each token starts, shape (n,)."""
        return np.concatenate((np.zeros(1, dtype=np.int64), self.ends[:-1]))[: len(self.ends)]


def utf8(text: str) -> bytes:
    """Return UTF-8 of `text`. Raises TextMismatchError for half a character (a lone surrogate), which no tokenizer
    takes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TextMismatchError(
            f"the text has a lone surrogate at character {error.start}, expected Unicode text"
        ) from None


def token_offsets(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, text: str | None = None) -> Ints:
    """Return UTF-8 byte interval `[start, end)` of every token, shape (n, 2), for any ids, canonical or not.

    The intervals partition `text` (by default: what the ids decode to in a completion). A token that is part of a
    character covers its bytes; a control token covers none. Bytes that are no UTF-8 are those of the U+FFFD that stands
    for them: the token that completes the sequence covers it, those before cover none of it.

    Raises TokenError for an id outside the vocabulary, TextMismatchError when the ids do not decode to `text`,
    TokenizerError for a tokenizer that is slow or of an unknown kind.
    """
    table = table_of(tokenizer)
    array = table.check(ids)
    data = table.read(array)[0] if text is None else utf8(text)
    placed = place_tokens(array, table, data)
    return np.stack((placed.starts, placed.ends), axis=1)


def place_tokens(ids: Ints, table: TokenTable, data: bytes) -> TokenSpans:
    """Return the tokens on the text `data` that they decode to, with or without the space that some decoders strip.

    Raises TextMismatchError when they decode to something else.
    """
    lengths = table.lengths[ids]
    all_text = bool(lengths.all())  # no control token, none that covers no byte
    control = None if all_text else table.control[ids]
    marked = control if control is not None and control.any() else None
    if table.raw(ids.tolist()) == data:
        return TokenSpans(lengths.cumsum(dtype=np.int64), marked, all_text=all_text)
    read, ends = table.read(ids)
    stripped = len(read) - len(data)
    if read == data:
        return TokenSpans(ends, marked)
    if 0 < stripped <= _strippable(table, ids) and read == b" " * stripped + data:
        return TokenSpans(np.maximum(ends - stripped, 0), marked)
    raise TextMismatchError(_difference(read, data))


def _strippable(table: TokenTable, ids: Ints) -> int:
    """Return how many leading whitespace the decoder may take from the text of `ids`."""
    if table.strips != FIRST_TOKEN:
        return table.strips
    first = next((piece for i in ids.tolist() if (piece := table.pieces[i])), b"")
    return len(first) - len(first.lstrip(b" "))


def _difference(read: bytes, data: bytes) -> str:
    read_text, expected = read.decode(), data.decode()
    place = next((n for n, (a, b) in enumerate(zip(read_text, expected, strict=False)) if a != b), None)
    place = min(len(read_text), len(expected)) if place is None else place
    return (
        f"the ids do not decode to the text: at character {place} they give {read_text[place : place + 20]!r}, "
        f"expected {expected[place : place + 20]!r} (decode sampled ids with thl.decode_completion; encode with "
        "thl.retokenize)"
    )


def place_any(ids: Ints, table: TokenTable, data: bytes) -> TokenSpans:
    """Return the tokens that a tokenizer has for the text `data`, whether or not they carry it."""
    try:
        return place_tokens(ids, table, data)
    except TextMismatchError:
        return place_changed(ids, table, data)


def place_changed(ids: Ints, table: TokenTable, data: bytes) -> TokenSpans:
    """Return the tokens of a tokenizer that changed the text: what it kept has its place, the rest is marked.

    A token is `changed` unless all its bytes stand in the text; a byte of the text is `lost` unless a token has it.
    What stands in place of lost bytes reaches up to the next kept one; bytes that were dropped go with the token behind
    them. Compared word by word, and by character within a word that has as many as before.
    """
    read, ends = table.read(ids)
    there = _kept(read, data)  # for each byte read: its byte in the text, or -1
    intact = there >= 0
    reached = np.concatenate(([0], np.maximum.accumulate(np.where(intact, there + 1, 0))))
    following = np.append(there, len(data))
    closed = (following >= 0) & np.concatenate(
        ([False], ~intact)
    )  # behind a changed byte, before a kept one or the end
    at = np.where(closed, following, reached)
    starts = np.concatenate(([0], ends[:-1]))[: len(ends)]
    bad = np.concatenate(([0], np.cumsum(~intact)))
    intact_spans = (bad[ends] == bad[starts]) & (ends > starts)
    control = table.control[ids]
    lost = np.ones(len(data), dtype=np.bool_)
    lost[there[intact]] = False
    return TokenSpans(at[ends], control if control.any() else None, ~intact_spans & ~control, lost)


def _kept(read: bytes, data: bytes) -> Ints:
    """Return for each byte of `read` the byte of `data` that it is, or -1 where it was changed."""
    there = np.full(len(read), -1, dtype=np.int64)
    read_text, expected = read.decode(), data.decode()
    at_found = byte_positions(read_text, read, list(range(len(read_text) + 1)))
    at_expected = byte_positions(expected, data, list(range(len(expected) + 1)))
    for i, j, size in _equal_passages(read_text, expected):
        a, a_stop, b = at_found[i], at_found[i + size], at_expected[j]
        there[a:a_stop] = np.arange(b, b + a_stop - a)
    return there


def _equal_passages(found: str, expected: str) -> Iterator[tuple[int, int, int]]:
    """Yield passages that two texts share, in order, as (start in one, start in the other, characters).

    What the two begin and end with is taken off first, and frequent words start no match in between, so that a long
    text of few different words does not take quadratic time.
    """
    head = _shared(found, expected)
    tail = _shared(found[head:][::-1], expected[head:][::-1])
    if head:
        yield 0, 0, head
    middle, other = found[head : len(found) - tail], expected[head : len(expected) - tail]
    yield from ((head + i, head + j, size) for i, j, size in _by_word(middle, other))
    if tail:
        yield len(found) - tail, len(expected) - tail, tail


def _shared(one: str, other: str) -> int:
    """Return length of the beginning that two texts share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _by_word(found: str, expected: str) -> Iterator[tuple[int, int, int]]:
    words, other = _UNITS.findall(found), _UNITS.findall(expected)
    edges, other_edges = [0, *accumulate(map(len, words))], [0, *accumulate(map(len, other))]
    for what, i, i_end, j, j_end in _opcodes(words, other):
        a, a_end, b, b_end = edges[i], edges[i_end], other_edges[j], other_edges[j_end]
        if what == "equal":
            yield a, b, a_end - a
        elif a_end - a == b_end - b:  # as many characters: each stands for one. Else which is which cannot be known.
            yield from ((a + n, b + n, 1) for n in range(a_end - a) if found[a + n] == expected[b + n])


def _opcodes(words: Sequence[str], other: Sequence[str]) -> Iterable[tuple[str, int, int, int, int]]:
    """Return difflib's, but word against word where there are equally many: then none was joined or split."""
    if len(words) == len(other):
        return [
            ("equal" if a == b else "replace", n, n + 1, n, n + 1)
            for n, (a, b) in enumerate(zip(words, other, strict=True))
        ]
    return difflib.SequenceMatcher(None, words, other).get_opcodes()
