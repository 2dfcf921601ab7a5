"""Bytes of every token of a vocabulary, computed once per tokenizer.

They give the byte intervals of any id sequence, canonical or not, without re-encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mutualrl.errors import TokenError, TokenizerError
from mutualrl.thl.decoders import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = npt.NDArray[np.int64]
TokenIds = Sequence[int] | npt.NDArray[np.integer]

_REPLACEMENT = "\ufffd".encode()
_ABSENT = -1
_PROBES = 64  # number of ids that a new table is checked on


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Bytes of the V ids of a vocabulary.

    `pieces[id]`: the token's bytes in a text, empty for a control token (one that decoding skips) and for an unused
    id. `lengths`, shape (V,): their number, -1 for an unused id. `control`, shape (V,). `byte_tokens`, shape (V,): a
    single byte of a byte fallback. `strips`: the number of leading spaces that the decoder strips from a text
    (`decoders.FIRST_TOKEN`: those of the first token). `names`: content of the control tokens by id. `unknown`: the id
    of the unknown token, or -1."""

    pieces: list[bytes]
    lengths: npt.NDArray[np.int32]
    control: npt.NDArray[np.bool_]
    byte_tokens: npt.NDArray[np.bool_]
    strips: int
    names: dict[int, str]
    unknown: int
    #: the pieces one after another, and where each begins
    spelling: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int32]

    def check(self, ids: TokenIds) -> Ints:
        """Return `ids` as an array, shape (n,). Raises TokenError for an id that is not in the vocabulary."""
        array = np.asarray(ids)
        if array.size == 0:
            return np.zeros(0, dtype=np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TokenError(f"token ids: found {array.dtype} of shape {array.shape}, expected a flat list of integers")
        size = len(self.pieces)
        if array.min() < 0 or array.max() >= size or self.lengths[array].min() < 0:
            valid = [0 <= i < size and self.lengths[i] >= 0 for i in array.tolist()]
            position = valid.index(False)
            raise TokenError(
                f"token id {array[position]} at position {position} is not in the vocabulary (ids 0 to {size - 1}); "
                "are these ids of another tokenizer?"
            )
        return array.astype(np.int64, copy=False)

    def raw(self, ids: list[int]) -> bytes:
        """Return the bytes of the ids in the middle of a text; they need not be valid UTF-8."""
        return b"".join(map(self.pieces.__getitem__, ids))

    def spell(self, ids: npt.NDArray[np.integer]) -> tuple[bytes, Ints]:
        """Return what `raw` does of many ids, all of the vocabulary, and the byte where each token ends, shape (n,)."""
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths, dtype=np.int64)
        size = int(ends[-1]) if len(ends) else 0
        index = np.int32 if size < 2**31 else np.int64  # narrow: the time is that of memory
        places = np.repeat((self.starts[ids] - (ends - lengths)).astype(index), lengths)
        places += np.arange(size, dtype=index)
        return self.spelling[places].tobytes(), ends

    def read(self, ids: Ints) -> tuple[bytes, Ints]:
        """Return the text that `ids` decode to in context, as UTF-8, and the byte where each token ends, shape (n,).

        Invalid bytes become U+FFFD as in the decoder; a token that ends inside an invalid sequence ends before it.
        """
        raw, ends = self.raw(ids.tolist()), np.cumsum(self.lengths[ids], dtype=np.int64)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return self._read_bytes(ids) if self.byte_tokens.any() else _replaced(raw, ends)
        return raw, ends

    def _read_bytes(self, ids: Ints) -> tuple[bytes, Ints]:
        """Decode as byte fallback does: a run of byte tokens that is invalid UTF-8 as a whole has every byte
        replaced."""
        listed = ids.tolist()
        pieces = [self.pieces[i] for i in listed]
        is_byte = [bool(self.byte_tokens[i]) for i in listed]
        text_like = [position for position, i in enumerate(listed) if self.pieces[i]]
        start = 0
        while start < len(text_like):
            stop = start
            while stop < len(text_like) and is_byte[text_like[stop]]:
                stop += 1
            run = text_like[start:stop]
            if run and not _valid(b"".join(pieces[position] for position in run)):
                for position in run:
                    pieces[position] = _REPLACEMENT
            start = max(stop, start + 1)
        return b"".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)


def _valid(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _replaced(raw: bytes, ends: Ints) -> tuple[bytes, Ints]:
    """Return `raw` with every maximal invalid sequence replaced, and `ends` adjusted."""
    moved = np.zeros(len(raw) + 1, dtype=np.int64)  # raw position -> position in the result
    result, place = b"", 0
    while place < len(raw):
        try:
            raw[place:].decode()
            good, bad = len(raw) - place, 0
        except UnicodeDecodeError as error:
            good, bad = error.start, error.end - error.start
        moved[place : place + good + 1] = len(result) + np.arange(good + 1)
        result += raw[place : place + good]
        if bad:
            moved[place + good : place + good + bad] = len(result)
            result += _REPLACEMENT
            moved[place + good + bad] = len(result)
        place += good + bad
    return result, moved[ends]


def control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return ids that are not text: those that `decode(skip_special_tokens=True)` skips, and the tokenizer's named
    special tokens.

    (transformers' `all_special_ids` alone lacks most of them: it has two of Qwen's fourteen.)
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


@dataclass(frozen=True, slots=True)
class _Cached:
    version: tuple[int, ...]
    table: TokenTable


_TABLES: WeakKeyDictionary[PreTrainedTokenizerBase, _Cached] = WeakKeyDictionary()


def table_of(tokenizer: PreTrainedTokenizerBase) -> TokenTable:
    """Return the table of a tokenizer, built on first use and rebuilt when its vocabulary or special tokens change.

    (One change is missed: an existing piece that is added again as special, but is not one of the named specials.)
    Raises TokenizerError for a slow tokenizer, or for a decoder that is neither byte-level nor SentencePiece.
    """
    version = (len(tokenizer), *tokenizer.all_special_ids)
    cached = _TABLES.get(tokenizer)
    if cached is None or cached.version != version:
        cached = _TABLES[tokenizer] = _Cached(version, _build(tokenizer))
    return cached.table


def find_table(tokenizer: PreTrainedTokenizerBase) -> TokenTable | None:
    """Return the table of a tokenizer, or None when it is slow or has an unknown decoder."""
    try:
        return table_of(tokenizer)
    except TokenizerError:
        return None


def _build(tokenizer: PreTrainedTokenizerBase) -> TokenTable:
    reader = token_bytes(tokenizer)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    controls = control_ids(tokenizer)
    size = 1 + max(vocabulary.values(), default=-1)
    pieces = [b""] * size
    lengths = np.full(size, _ABSENT, dtype=np.int32)
    control, byte_tokens = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    names = {}
    for piece, token in vocabulary.items():
        if token in controls:
            lengths[token], control[token], names[token] = 0, True, piece
            continue
        data = pieces[token] = reader.bytes_of(piece)
        lengths[token] = len(data)
        if len(piece) == 6:
            byte_tokens[token] = reader.is_byte(piece)
    unknown = -1 if tokenizer.unk_token_id is None else int(tokenizer.unk_token_id)
    spelling = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    starts = np.zeros(size, dtype=np.int32)
    np.cumsum([len(piece) for piece in pieces[:-1]], out=starts[1:])
    table = TokenTable(pieces, lengths, control, byte_tokens, reader.strips, names, unknown, spelling, starts)
    _compare(table, tokenizer)
    return table


def _compare(table: TokenTable, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise TokenizerError unless the table decodes a sample of ids as the tokenizer does."""
    ids = np.flatnonzero((table.lengths > 0) & ~table.control)
    probe = ids[:: max(1, len(ids) // _PROBES)]
    ours = table.read(probe)[0].decode()
    decoded = tokenizer.decode(probe.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if ours.lstrip(" ") != decoded.lstrip(" "):
        position = next((n for n, (a, b) in enumerate(zip(ours, decoded, strict=False)) if a != b), len(ours))
        passage = slice(max(0, position - 10), position + 10)
        raise TokenizerError(
            f"tokenizer {tokenizer.name_or_path!r} decodes its tokens in an unknown way: expected {ours[passage]!r}, "
            f"its decode() gives {decoded[passage]!r}"
        )
