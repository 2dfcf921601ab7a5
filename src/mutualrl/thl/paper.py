"""Word map of the paper, kept bit for bit for reproduction: Algorithms "THL: PerTokenWordMapBySegments" and
"THL: WordAlignLogProbs".

It re-encodes the text, as a whole and word by word, and matches the two by position. On real text they differ (`.\\n`
is one token in the whole, two across words), so the map drifts and is truncated to the shorter; see `design/thl.md`.
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
    """Return the paper's PerTokenWordMapBySegments: ids of the whole text, and a word index (or None) per id.

    When the whole text and its words differ in number of tokens, both are truncated to the shorter.
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


def has_straddling_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a token of the whole text belongs to two words, so that the text encoded word by word, as in
    the map, differs from the text encoded as a whole (paper, Appendix "THL pseudocode", first paragraph)."""
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
    """Return the words of the paper's maps as units; `sources`, `targets`: number of response tokens per side."""
    source = _touch(*word_map(text, source_tokenizer), sources)
    target = _touch(*word_map(text, target_tokenizer), targets)
    count = 1 + max((int(side.unit.max()) for side in (source, target) if len(side.unit)), default=-1)
    return Units(count, source, target)


def _touch(full_ids: Sequence[int], words: Sequence[int | None], tokens: int) -> Touch:
    length = min(tokens, len(full_ids))
    pairs = [(position, word) for position, word in enumerate(words[:length]) if word is not None]
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return Touch(table[:, 0], table[:, 1])


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the paper's Tokenize: ids of a text on its own, without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)  # no warning about its length
    return ids
