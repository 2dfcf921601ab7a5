"""Alignment error by length. Source: paper, Table "Long-context alignment error"."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from mutualrl.diagnostics.passages import Corpus
from mutualrl.diagnostics.results import Length, LengthRow
from mutualrl.diagnostics.thl.traces import (
    LazyModel,
    OnBatch,
    Scored,
    common_corpus,
    relative_error,
    score_texts,
    unit_mass,
)
from mutualrl.errors import DataError
from mutualrl.thl import Anchor, token_offsets, word_spans
from mutualrl.thl.units import Floats

_TRIES = 200
LENGTHS = (1024, 2048, 4096, 8192)  # target tokens


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
    source: LazyModel,
    target: LazyModel,
    anchor: Anchor,
    count: int,
    seed: int,
    on_batch: OnBatch,
    lengths: Sequence[int] = LENGTHS,
) -> Length:
    """Return the relative MAE by number of target tokens: of the alignment, the paper's map, and a copy by position.

    Only the source's model runs. Texts longer than its context are scored in windows.
    """
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
            {
                "target_tokens": tokens,
                "mean_target_tokens": float(np.mean([len(s.target_ids) for s in scored])),
                "sequences": len(scored),
                "repeating": sum(len(s.text) > len(corpus.text) for s in scored),
                "aligned": errors["aligned"],
                "paper": errors["paper"],
                "naive": errors["naive"],
                "reduction": 1 - errors["aligned"] / errors["naive"] if errors["naive"] else 0.0,
            }
        )
    return {
        "anchor": anchor,
        "passages_left_out": left_out,
        "corpus_characters": len(corpus.text),
        "window": source.engine.context - 1,
        "rows": rows,
    }


def _mass(scored: Scored, values: Floats, target: LazyModel) -> Floats:
    return unit_mass(scored.text, scored.target_ids, values, target.tokenizer)
