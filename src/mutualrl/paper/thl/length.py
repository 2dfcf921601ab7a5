"""Alignment error by length. Source: paper, Table "Long-context alignment error"."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import percent, table
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.diagnostics.passages import Corpus
from mutualrl.errors import DataError
from mutualrl.paper.thl.traces import (
    Pair,
    Scored,
    common_corpus,
    relative_error,
    score_texts,
    unit_mass,
)
from mutualrl.thl import token_offsets, word_spans
from mutualrl.thl.units import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRIES = 200
LENGTHS = (1024, 2048, 4096, 8192)  # target tokens
ERRORS = ("aligned", "paper", "naive")


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Relative MAE of word mass at one length: of the alignment, the paper's map, and a copy by position. `repeating`:
    stretches that are longer than the text, and repeat it."""

    target_tokens: int
    mean_target_tokens: float
    sequences: int
    repeating: int
    aligned: float
    paper: float
    naive: float
    reduction: float


@dataclass(frozen=True, slots=True)
class Length:
    """Result. `window`: tokens that the source's model scores at once."""

    anchor: str
    passages_left_out: int
    corpus_characters: int
    window: int
    rows: list[LengthRow]


def stretches(corpus: Corpus, tokens: int, count: int, target: LazyModel, seed: int) -> list[str]:
    """Return `count` contiguous stretches of whole words, each filling `tokens` target tokens as far as possible.

    Raises DataError when the text has none that the target encodes unchanged.
    """
    rng = random.Random(seed)
    width, failures = 1.0, 0
    texts: list[str] = []
    while len(texts) < count:
        text = corpus.stretch(round(tokens * width), rng)
        ids = target.encode(text)
        if ids is None:
            failures += 1
            if failures > _TRIES:
                raise DataError(f"the text has no stretch of {tokens} tokens that {target.name} encodes unchanged")
            continue
        if len(ids) <= tokens:
            width *= 1.3  # characters per token
            continue
        end = int(token_offsets(ids, target.tokenizer, text)[tokens - 1, 1])
        limit = len(text.encode()[:end].decode(errors="ignore"))
        ends = [stop for _, stop in word_spans(text) if stop <= limit]
        texts.append(text[: ends[-1]] if ends else text[:limit])
    return texts


def naive(trace: Floats, targets: int) -> Floats:
    """Return the paper's baseline: source log-probs at the same positions, cut at the target's length, padded with
    zeros."""
    values = np.zeros(targets)
    shared = min(len(trace), targets)
    values[:shared] = trace[:shared]
    return values


def length(
    passages: Sequence[str],
    pair: Pair,
    count: int,
    seed: int,
    on_batch: OnBatch,
    lengths: Sequence[int] = LENGTHS,
) -> Length:
    """Return the relative MAE by number of target tokens: of the alignment, the paper's map, and a copy by position.

    Only the source's model runs. Texts longer than its context are scored in windows.
    """
    source, target, anchor = pair
    corpus, left_out = common_corpus(passages, source, target)
    rows: list[LengthRow] = []
    for tokens in lengths:
        scored = score_texts(stretches(corpus, tokens, count, target, seed), source, target, on_batch)
        truth = [unit_mass(s.text, s.source_ids, s.trace, source.tokenizer) for s in scored]
        estimates = {
            "aligned": [s.align(source, target, anchor) for s in scored],
            "paper": [s.align(source, target, "paper") for s in scored],
            "naive": [naive(s.trace, len(s.target_ids)) for s in scored],
        }
        errors = {}
        for name, traces in estimates.items():
            masses = [_mass(s, values, target) for s, values in zip(scored, traces, strict=True)]
            errors[name] = relative_error(masses, truth)
        rows.append(
            LengthRow(
                target_tokens=tokens,
                mean_target_tokens=float(np.mean([len(s.target_ids) for s in scored])),
                sequences=len(scored),
                repeating=sum(len(s.text) > len(corpus.text) for s in scored),
                **errors,
                reduction=1 - errors["aligned"] / errors["naive"] if errors["naive"] else 0.0,
            )
        )
    return Length(
        anchor=anchor,
        passages_left_out=left_out,
        corpus_characters=len(corpus.text),
        window=source.engine.context - 1,
        rows=rows,
    )


def _mass(scored: Scored, values: Floats, target: LazyModel) -> Floats:
    return unit_mass(scored.text, scored.target_ids, values, target.tokenizer)


def markdown(pairs: Sequence[tuple[str, Length]]) -> str:
    """Return the table of all pairs. `pairs`: with their labels."""
    rows, repeated = [], set()
    for label, result in pairs:
        for row in result.rows:
            errors = [percent(getattr(row, name)) for name in (*ERRORS, "reduction")]
            rows.append([label, str(row.target_tokens), str(row.sequences), *errors])
            repeated |= {row.target_tokens} if row.repeating else set()
    head = ["pair", "target tokens", "sequences", "aligned (%)", "the paper's map (%)", "copy by position (%)"]
    text = table("length: relative MAE of word mass", [*head, "reduction (%)"], rows)
    if not repeated:
        return text
    return f"{text}\n\nThe text is shorter than {min(repeated)} tokens: stretches of that length repeat it."


def draw(axis: Axes, result: Length) -> None:
    """Draw the errors over the length."""
    tokens = [row.target_tokens for row in result.rows]
    for name, label in zip(ERRORS, (result.anchor, "the paper's map", "copy by position"), strict=True):
        axis.plot(tokens, [100 * getattr(row, name) for row in result.rows], marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_ylim(bottom=0)
    axis.set(xlabel="target tokens", ylabel="relative MAE (%)")
    axis.legend()
