"""Words and characters: the tokenizer-free coordinates of an alignment.

Source: paper, Algorithm "THL: WordSpans" and Section "Non-whitespace languages".
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Unit = Literal["auto", "word", "char"]
UNITS: tuple[Unit, ...] = get_args(Unit)

_WORD = re.compile(r"\S+")
_CHARACTER = re.compile(r"\S")
#: the CJK, kana, bopomofo and hangul blocks of Unicode
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\u2fdf\u2ff0-\u303f\u3040-\u30ff\u3100-\u31ff\u3200-\u4dbf\u4e00-\u9fff\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff66-\uffdc\U0001aff0-\U0001b16f\U00020000-\U0003347f]"
)


def has_cjk(text: str) -> bool:
    """Return whether `text` has a code point in the CJK, kana, bopomofo or hangul blocks."""
    return not text.isascii() and _CJK.search(text) is not None


def word_spans(text: str, unit: Unit = "auto") -> list[tuple[int, int]]:
    r"""Return the character intervals `[start, end)` of the words of `text`, in order.

    `word`: maximal runs of non-whitespace (the regular expression `\S+`, the paper's rule); `char`: single
    non-whitespace characters (code points); `auto`: `char` when the text has CJK, else `word`, decided
    per text. Whitespace is in no span. Raises ValueError for an unknown unit.
    """
    if unit not in UNITS:
        raise ValueError(f"unit: found {unit!r}, expected one of: {', '.join(UNITS)}")
    single = unit == "char" or (unit == "auto" and has_cjk(text))
    return [match.span() for match in (_CHARACTER if single else _WORD).finditer(text)]


def segment_ends(text: str, unit: Unit = "auto") -> list[int]:
    """Return the character ends of the segments that partition `text`: a word with the whitespace before it.

    Trailing whitespace is a separate segment; a text of whitespace is one segment; an empty text has none.
    """
    ends = [end for _, end in word_spans(text, unit)]
    if text and (not ends or ends[-1] < len(text)):
        ends.append(len(text))
    return ends


def character_positions(data: bytes) -> npt.NDArray[np.float64]:
    """Return the number of characters before every byte position 0..N of UTF-8 `data`, shape (N + 1,).

    Inside a character the number is fractional: each of its k bytes is 1/k of a character.
    """
    size = len(data)
    if data.isascii():
        return np.arange(size + 1, dtype=np.float64)
    edges = _edges(data)
    return np.interp(np.arange(size + 1), edges, np.arange(len(edges), dtype=np.float64))


def byte_positions(text: str, data: bytes, characters: list[int]) -> npt.NDArray[np.int64]:
    """Return the byte positions of character positions 0..len(text) in UTF-8 `data`."""
    positions = np.asarray(characters, dtype=np.int64)
    if len(text) == len(data):
        return positions
    return _edges(data)[positions]


def _edges(data: bytes) -> npt.NDArray[np.int64]:
    """Return the byte where each character of UTF-8 `data` starts, and where the last ends."""
    raw = np.frombuffer(data, dtype=np.uint8)
    return np.append(np.flatnonzero((raw & 0xC0) != 0x80), len(data))
