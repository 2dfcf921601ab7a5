"""Models on texts: ids, log-probs, and mass by unit. What the suites share.

A unit is a word with the blanks before it, or, in a text with CJK, a character. A token over several units
gives each the part of its characters there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mutualrl.diagnostics.passages import Corpus
from mutualrl.diagnostics.thl.endpoints import Endpoint
from mutualrl.engines.base import ScoringEngine
from mutualrl.errors import DataError, TextMismatchError
from mutualrl.thl import Anchor, align_logprobs, has_cjk, retokenize
from mutualrl.thl.offsets import Placement, place, utf8
from mutualrl.thl.paper import tokenize
from mutualrl.thl.table import table_of
from mutualrl.thl.transfer import gather
from mutualrl.thl.units import Floats, segment_units
from mutualrl.thl.words import Unit, byte_positions, character_positions, segment_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: told how many rows are done
OnBatch = Callable[[int], None]
_NOTHING = Placement(np.zeros(0, dtype=np.int64), whole=True)


@dataclass
class Voice:
    """One end of a pair: a tokenizer, and its model, each loaded on first use."""

    endpoint: Endpoint

    @property
    def name(self) -> str:
        """How the pair's tables call it."""
        return self.endpoint.name

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises ModelError when it cannot be loaded."""
        return self.endpoint.tokenizer()

    @cached_property
    def engine(self) -> ScoringEngine:
        """The model in an engine. Raises ModelError when it cannot be loaded."""
        return self.endpoint.engine()

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text that begins a document; None when they do not carry it."""
        table = table_of(self.tokenizer)
        for encode in (tokenize, lambda text, tokenizer: list(retokenize(text, tokenizer).ids)):
            ids: list[int] = encode(text, self.tokenizer)
            try:
                place(table.check(ids), table, utf8(text))
            except TextMismatchError:
                continue
            return ids
        return None

    def score(self, texts: Sequence[Sequence[int]], on_batch: OnBatch | None = None) -> list[Floats]:
        """Log-probs of every token of texts behind a start token, nats."""
        from mutualrl.engines.scoring import start_token

        return self.engine.text_logprobs(start_token(self.tokenizer), texts, on_batch)


@dataclass(frozen=True)
class Scored:
    """A text, the source's ids of it and their log-probs, the target's ids of it."""

    text: str
    source_ids: list[int]
    trace: Floats
    target_ids: list[int]

    def align(self, source: Voice, target: Voice, anchor: Anchor, unit: Unit = "auto") -> Floats:
        """The source's trace on the target's tokens; 0 where uncovered."""
        aligned = align_logprobs(
            self.text, self.source_ids, self.trace, source.tokenizer, target.tokenizer,
            target_ids=self.target_ids, anchor=anchor, unit=unit,
        )  # fmt: skip
        return np.where(aligned.covered, aligned.logprobs, 0.0)


def score_texts(texts: Sequence[str], source: Voice, target: Voice, on_batch: OnBatch) -> list[Scored]:
    """The source's traces on texts that both carry."""
    both = [(text, source.encode(text), target.encode(text)) for text in texts]
    kept = [(text, ids, target_ids) for text, ids, target_ids in both if ids is not None and target_ids is not None]
    traces = source.score([ids for _, ids, _ in kept], on_batch)
    return [Scored(text, ids, trace, target_ids) for (text, ids, target_ids), trace in zip(kept, traces, strict=True)]


def common_corpus(passages: Sequence[str], source: Voice, target: Voice) -> tuple[Corpus, int]:
    """The passages that both tokenizers carry, as a corpus, and how many were left out.

    Passages with CJK are left out where there are others: one such character would make the unit of a long stretch the
    character instead of the word. Raises DataError when none is left.
    """
    stripped = [passage.strip() for passage in passages]
    by_word = [text for text in stripped if not has_cjk(text)] or stripped
    kept = [text for text in by_word if source.encode(text) is not None and target.encode(text) is not None]
    if not kept:
        raise DataError(
            f"none of the {len(passages)} passages is carried unchanged by both {source.name} and {target.name}; "
            "give others with --text"
        )
    return Corpus(kept), len(passages) - len(kept)


def unit_mass(
    text: str, ids: Sequence[int], values: Floats, tokenizer: PreTrainedTokenizerBase, unit: Unit = "auto"
) -> Floats:
    """Sum of the tokens' values in every unit of the text, shape (W,).

    Raises TextMismatchError when the ids do not carry the text.
    """
    data = utf8(text)
    table = table_of(tokenizer)
    edges = byte_positions(text, data, segment_ends(text, unit))
    side = place(table.check(ids), table, data)
    touch = segment_units(side, _NOTHING, edges, character_positions(data)).source
    return gather(touch, values, len(edges))


def relative_error(found: Sequence[Floats], truth: Sequence[Floats]) -> float:
    """Relative MAE = sum over units |Z_src - Z_aligned| / sum |Z_src|, over all texts together."""
    missed = sum(float(np.abs(a - b).sum()) for a, b in zip(found, truth, strict=True))
    whole = sum(float(np.abs(b).sum()) for b in truth)
    return missed / whole if whole else 0.0
