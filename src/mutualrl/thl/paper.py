"""The paper's own word map, kept bit for bit for reproduction: Algorithms "THL: PerTokenWordMapBySegments" and
"THL: WordAlignLogProbs".

It encodes the text again, whole and word by word, and matches the two by position. On real text they differ (`.\\n` is
one token in the whole, two across words), so the map drifts and is cut at the shorter length; see `design/thl.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.thl.units import Touch, Units
from mutualrl.thl.words import word_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def word_map(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int | None]]:
    """Return the paper's PerTokenWordMapBySegments: ids of the whole text, and a word index (or None) for each.

    Both are cut to the shorter of the whole's and the words' number of tokens when these differ.
    """
    full_ids = tokenize(text, tokenizer)
    built_ids: list[int] = []
    words: list[int | None] = []
    prev_end = 0
    for index, (start, end) in enumerate(word_spans(text, "word")):
        segment_ids = tokenize(text[prev_end:end], tokenizer)
        built_ids += segment_ids
        leading = len(tokenize(text[:start], tokenizer)) if prev_end == 0 and start > 0 else 0
        words += [None] * leading
        words += [index] * (len(segment_ids) - leading)
        prev_end = end
    if len(built_ids) != len(full_ids):
        length = min(len(built_ids), len(full_ids))
        full_ids, words = full_ids[:length], words[:length]
    return full_ids, words


def straddles(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether some token of the whole text belongs to two words: the text encoded word by word, as the map
    builds it, is then not the text encoded as a whole (paper, Appendix "THL pseudocode", its first paragraph)."""
    ends = [0, *(end for _, end in word_spans(text, "word"))]
    built = [token for start, end in pairwise(ends) for token in tokenize(text[start:end], tokenizer)]
    return built != tokenize(text[: ends[-1]], tokenizer)


def paper_units(
    text: str,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    sources: int,
    targets: int,
) -> Units:
    """Return the words of the paper's maps as units; `sources`, `targets`: how many response tokens each side has."""
    source = _touch(*word_map(text, source_tokenizer), sources)
    target = _touch(*word_map(text, target_tokenizer), targets)
    count = 1 + max((int(side.unit.max()) for side in (source, target) if len(side.unit)), default=-1)
    return Units(count, source, target)


def _touch(full_ids: Sequence[int], words: Sequence[int | None], tokens: int) -> Touch:
    length = min(tokens, len(full_ids))
    pairs = [(place, word) for place, word in enumerate(words[:length]) if word is not None]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Touch(table[:, 0], table[:, 1])


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the paper's Tokenize: ids of a text by itself, without special tokens around it."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)  # no word on the context's length
    return ids
