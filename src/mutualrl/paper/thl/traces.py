"""Token ids, log-probs and unit masses of texts, shared by the suites.

A unit is a word with the whitespace before it, or, in a text with CJK, a character. A token over several units
is split between them in proportion to its characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.diagnostics.passages import Corpus
from mutualrl.errors import DataError
from mutualrl.thl import Anchor, align_logprobs, has_cjk
from mutualrl.thl.offsets import TokenSpans, locate_tokens, utf8
from mutualrl.thl.table import table_of
from mutualrl.thl.transfer import gather_units
from mutualrl.thl.units import Floats, segment_units
from mutualrl.thl.words import Unit, byte_positions, character_positions, segment_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOTHING = TokenSpans(np.zeros(0, dtype=np.int64), all_text=True)


class Pair(NamedTuple):
    """An ordered pair of models, and how traces of the source are aligned with the target's tokens."""

    source: LazyModel
    target: LazyModel
    anchor: Anchor


@dataclass(frozen=True)
class Scored:
    """Text with the source's ids and their log-probs, and the target's ids."""

    text: str
    source_ids: list[int]
    trace: Floats
    target_ids: list[int]

    def align(self, source: LazyModel, target: LazyModel, anchor: Anchor, unit: Unit = "auto") -> Floats:
        """Return the source's trace on the target's tokens; 0 where uncovered."""
        aligned = align_logprobs(
            self.text,
            self.source_ids,
            self.trace,
            source.tokenizer,
            target.tokenizer,
            target_ids=self.target_ids,
            anchor=anchor,
            unit=unit,
        )
        return np.where(aligned.covered, aligned.logprobs, 0.0)


def score_texts(texts: Sequence[str], source: LazyModel, target: LazyModel, on_batch: OnBatch) -> list[Scored]:
    """Return the source's traces on the texts that both encode unchanged."""
    encoded: list[tuple[str, list[int], list[int]]] = []
    for text in texts:
        ids, target_ids = source.encode(text), target.encode(text)
        if ids is not None and target_ids is not None:
            encoded.append((text, ids, target_ids))
    traces = source.score([ids for _, ids, _ in encoded], on_batch)
    return [
        Scored(text, ids, trace, target_ids) for (text, ids, target_ids), trace in zip(encoded, traces, strict=True)
    ]


def common_corpus(passages: Sequence[str], source: LazyModel, target: LazyModel) -> tuple[Corpus, int]:
    """Return the passages that both tokenizers encode unchanged, as a corpus, and the number left out.

    Passages with CJK are left out if there are others: a single such character would make the unit of a long stretch
    the character instead of the word. Raises DataError when none remain.
    """
    stripped = [passage.strip() for passage in passages]
    by_word = [text for text in stripped if not has_cjk(text)] or stripped
    encodable = [text for text in by_word if source.encode(text) is not None and target.encode(text) is not None]
    if not encodable:
        raise DataError(
            f"none of the {len(passages)} passages is encoded unchanged by both {source.name} and {target.name}; "
            "choose others with --text"
        )
    return Corpus(encodable), len(passages) - len(encodable)


def unit_mass(
    text: str, ids: Sequence[int], values: Floats, tokenizer: PreTrainedTokenizerBase, unit: Unit = "auto"
) -> Floats:
    """Return the sum of the tokens' values in every unit of the text, shape (W,).

    Raises TextMismatchError when the ids do not decode to the text.
    """
    data = utf8(text)
    table = table_of(tokenizer)
    edges = byte_positions(text, data, segment_ends(text, unit))
    side = locate_tokens(table.check(ids), table, data)
    touch = segment_units(side, _NOTHING, edges, character_positions(data)).source
    return gather_units(touch, values, len(edges))


def relative_error(estimates: Sequence[Floats], truth: Sequence[Floats]) -> float:
    """Return relative MAE = sum over units |Z_src - Z_aligned| / sum |Z_src|, over all texts."""
    error = sum(float(np.abs(a - b).sum()) for a, b in zip(estimates, truth, strict=True))
    total = sum(float(np.abs(b).sum()) for b in truth)
    return error / total if total else 0.0
