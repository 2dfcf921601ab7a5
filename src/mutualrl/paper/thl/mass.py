"""Errors of word mass. Source: paper, Table "THL preserves source word-level mass on WikiText-103"."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import significant, table
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.diagnostics.passages import Corpus
from mutualrl.diagnostics.vocabulary import direction
from mutualrl.errors import DataError
from mutualrl.paper.thl.traces import Pair, Scored, common_corpus, score_texts, unit_mass
from mutualrl.thl import Anchor
from mutualrl.thl.units import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORTEST, LONGEST = 5, 80  # source tokens of a span
_TRIES = 200


@dataclass(frozen=True, slots=True)
class MassRow:
    """Errors of word mass, nats, of `words` words."""

    source: str
    target: str
    anchor: str
    words: int
    source_aligned_mae: float
    source_aligned_max: float
    aligned_target_mae: float
    aligned_target_max: float
    prefix_leak_max: float


@dataclass(frozen=True, slots=True)
class Mass:
    """Result: the number of spans, and a row per pair of models and anchor."""

    spans: int
    passages_left_out: int
    rows: list[MassRow]


def spans(corpus: Corpus, count: int, source: LazyModel, target: LazyModel, seed: int) -> list[str]:
    """Return contiguous stretches of whole words with 5 to 80 source tokens that both tokenizers encode unchanged.

    Raises DataError when the text has none.
    """
    rng = random.Random(seed)
    per_token = len(corpus.text) / max(1, len(source.encode(corpus.text) or corpus.text))
    texts: list[str] = []
    for _ in range(count * _TRIES):
        if len(texts) == count:
            break
        text = corpus.stretch(round(rng.uniform(SHORTEST, LONGEST) * per_token), rng)
        ids = source.encode(text)
        if ids is not None and SHORTEST <= len(ids) <= LONGEST and target.encode(text) is not None:
            texts.append(text)
    if not texts:
        raise DataError(f"the text has no stretch of {SHORTEST} to {LONGEST} tokens of {source.name}")
    return texts


def mass(passages: Sequence[str], pair: Pair, count: int, seed: int, on_batch: OnBatch) -> Mass:
    """Return per-word errors in nats, between source and aligned, and between aligned and the target's log-probs.

    Rows: each model onto itself (the paper's controls), source onto target with `anchor`, and with the paper's map.
    `prefix_leak_max`: the largest |sum over the words so far of source - aligned|.
    """
    source, target, anchor = pair
    corpus, left_out = common_corpus(passages, source, target)
    texts = spans(corpus, count, source, target, seed)
    forward = score_texts(texts, source, target, on_batch)
    target_traces = target.score([scored.target_ids for scored in forward], on_batch)
    target_alone = [
        Scored(scored.text, scored.target_ids, values, scored.target_ids)
        for scored, values in zip(forward, target_traces, strict=True)
    ]
    source_alone = [Scored(scored.text, scored.source_ids, scored.trace, scored.source_ids) for scored in forward]
    rows = [
        _row(source, source, anchor, source_alone, [scored.trace for scored in source_alone]),
        _row(target, target, anchor, target_alone, target_traces),
        _row(source, target, anchor, forward, target_traces),
        *([] if anchor == "paper" else [_row(source, target, "paper", forward, target_traces)]),
    ]
    return Mass(len(texts), left_out, rows)


def _row(
    source: LazyModel, target: LazyModel, anchor: Anchor, scored: Sequence[Scored], native_traces: Sequence[Floats]
) -> MassRow:
    original = [unit_mass(s.text, s.source_ids, s.trace, source.tokenizer) for s in scored]
    aligned = [unit_mass(s.text, s.target_ids, s.align(source, target, anchor), target.tokenizer) for s in scored]
    native = [
        unit_mass(s.text, s.target_ids, values, target.tokenizer)
        for s, values in zip(scored, native_traces, strict=True)
    ]
    source_errors = np.abs(np.concatenate([a - b for a, b in zip(original, aligned, strict=True)]))
    target_errors = np.abs(np.concatenate([a - b for a, b in zip(aligned, native, strict=True)]))
    leaks = [float(np.abs(np.cumsum(a - b)).max(initial=0.0)) for a, b in zip(original, aligned, strict=True)]
    return MassRow(
        source=source.name,
        target=target.name,
        anchor=anchor,
        words=len(source_errors),
        source_aligned_mae=float(source_errors.mean()),
        source_aligned_max=float(source_errors.max()),
        aligned_target_mae=float(target_errors.mean()),
        aligned_target_max=float(target_errors.max()),
        prefix_leak_max=max(leaks),
    )


def markdown(pairs: Sequence[tuple[str, Mass]]) -> str:
    """Return the table of all pairs, each model onto itself once. `pairs`: with their labels."""
    keys = [entry.name for entry in fields(MassRow)][4:]
    cells: dict[tuple[str, str, str], list[str]] = {}
    for _, result in pairs:
        for row in result.rows:
            errors = [significant(getattr(row, key)) for key in keys]
            shown = [direction(row.source, row.target), row.anchor, str(row.words), *errors]
            cells.setdefault((row.source, row.target, row.anchor), shown)
    head = ["pair", "anchor", "words", "Src→Aligned MAE", "Max", "Aligned→Target MAE", "Max", "Prefix Leak Max"]
    title = f"mass: errors of word mass in nats, {pairs[0][1].spans} spans of 5 to 80 tokens"
    return table(title, head, list(cells.values()))


def draw(axis: Axes, result: Mass) -> None:
    """Draw both errors of every row."""
    positions = np.arange(len(result.rows))
    axis.bar(positions - 0.2, [row.source_aligned_mae for row in result.rows], 0.4, label="Src→Aligned")
    axis.bar(positions + 0.2, [row.aligned_target_mae for row in result.rows], 0.4, label="Aligned→Target")
    labels = [f"{row.source} →\n{row.target}\n{row.anchor}" for row in result.rows]
    axis.set_xticks(positions, labels, fontsize=7, parse_math=False)
    axis.set(ylabel="MAE of word mass (nats)")
    axis.legend()
