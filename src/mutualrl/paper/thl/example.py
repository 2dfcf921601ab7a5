"""One text, word by word: a word's tokens and mass on the source's side, and what the target's tokens receive.

Source: paper, Figure "THL preserves word-level trace mass under tokenizer mismatch"; with `anchor="word"` a word's
mass Z_w = sum of its source log-probs is spread evenly, Z_w / C_w per target token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import name, table
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.errors import DataError
from mutualrl.paper.thl.traces import score_texts, unit_mass
from mutualrl.thl import Anchor
from mutualrl.thl.offsets import locate_tokens, utf8
from mutualrl.thl.table import table_of
from mutualrl.thl.units import Floats
from mutualrl.thl.words import segment_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: the text of the paper's figure
SENTENCE = "Thinking small is a self-fulfilling prophecy"


@dataclass(frozen=True, slots=True)
class ExampleWord:
    """Word of a text: tokens with their log-probs (source) or received values (target), and the sums; nats."""

    word: str
    source: list[tuple[str, float]]
    source_mass: float
    target: list[tuple[str, float]]
    target_mass: float


@dataclass(frozen=True, slots=True)
class Example:
    """Result: the words of a text."""

    text: str
    rows: list[ExampleWord]


def example(text: str, source: LazyModel, target: LazyModel, anchor: Anchor, on_batch: OnBatch) -> Example:
    """Return the words of a text. A token over several words stands with the one in which it ends.

    Raises DataError for a text that a tokenizer changes.
    """
    scored = score_texts([text], source, target, on_batch)
    if not scored:
        raise DataError(f"{text!r} is not encoded unchanged by both {source.name} and {target.name}")
    (each,) = scored
    values = each.align(source, target, anchor)
    source_mass = unit_mass(text, each.source_ids, each.trace, source.tokenizer)
    target_mass = unit_mass(text, each.target_ids, values, target.tokenizer)
    source_tokens = _by_word(text, each.source_ids, each.trace, source.tokenizer)
    target_tokens = _by_word(text, each.target_ids, values, target.tokenizer)
    words: list[ExampleWord] = []
    start = 0
    for index, end in enumerate(segment_ends(text)):
        words.append(
            ExampleWord(
                word=text[start:end].strip(),
                source=source_tokens[index],
                source_mass=float(source_mass[index]),
                target=target_tokens[index],
                target_mass=float(target_mass[index]),
            )
        )
        start = end
    return Example(text, words)


def _by_word(
    text: str, ids: Sequence[int], values: Floats, tokenizer: PreTrainedTokenizerBase
) -> list[list[tuple[str, float]]]:
    """Return the tokens of each word with their values, in nats."""
    data, table = utf8(text), table_of(tokenizer)
    ends = locate_tokens(table.check(ids), table, data).ends
    boundaries = [len(text[:end].encode()) for end in segment_ends(text)]
    words: list[list[tuple[str, float]]] = [[] for _ in boundaries]
    for token, end, value in zip(ids, ends, values, strict=True):
        words[int(np.searchsorted(boundaries, end))].append((tokenizer.decode([token]), float(value)))
    return words


def markdown(pairs: Sequence[tuple[str, Example]]) -> str:
    """Return one table per pair. `pairs`: with their labels."""
    head = ["word", "source tokens, log-prob", "sum Z_w", "target tokens, aligned value", "sum"]
    tables = []
    for label, result in pairs:
        rows = []
        for word in result.rows:
            sides = [_shown(word.source), f"{word.source_mass:.4f}", _shown(word.target), f"{word.target_mass:.4f}"]
            rows.append([name(word.word), *sides])
        tables.append(table(f"example: {label}, nats", head, rows))
    return "\n\n".join(tables)


def _shown(tokens: Sequence[tuple[str, float]]) -> str:
    return " ".join(f"`{name(text)}` {value:.3f}" for text, value in tokens)
