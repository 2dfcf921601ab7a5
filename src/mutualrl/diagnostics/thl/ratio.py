"""Importance ratios on responses sampled by the source. Source: paper, Tables "Token-level ratio statistics ..." and
"THL yields finite sequence-level importance ratios ...".

The numerator is always the target's log-prob of its own tokens of the response, after its own prompt tokens. The
denominators: the source's trace aligned; the source's trace of the same response after another prompt, aligned
(shuffled); a shifted map, where each word gets the mass of the previous one (broken); and the paper's map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mutualrl.diagnostics.results import Residual, SequenceRatioRow, TokenRatioRow
from mutualrl.diagnostics.thl.responses import Response, Responses
from mutualrl.diagnostics.thl.traces import LazyModel
from mutualrl.thl import BOUND, Alignment, Anchor, align_logprobs
from mutualrl.thl.transfer import transfer
from mutualrl.thl.units import Floats

LOW, HIGH = 0.8, 1.2  # the PPO band at epsilon 0.2
TALL = 10.0
DENOMINATORS = ("aligned", "shuffled prompt", "broken alignment", "paper's map", "paper's map with its fallback")
#: bins of the histograms, natural logarithms of ratios
BINS = np.linspace(-6.0, 6.0, 49)


def log_ratios(
    sampled: Responses, alignments: Sequence[Alignment], source: LazyModel, target: LazyModel, anchor: Anchor
) -> dict[str, list[Floats]]:
    """Return log-ratios of the covered target tokens of every response, by denominator; `alignments`: of the source's
    trace under the anchor."""
    variants = [
        ("shuffled prompt", sampled.shuffled, anchor),
        *([] if anchor == "paper" else [("paper's map", sampled.behaviour, "paper")]),
        *([] if anchor == "paper-fallback" else [(DENOMINATORS[-1], sampled.behaviour, "paper-fallback")]),
    ]
    aligned = {"aligned": _covered(sampled, alignments)}
    for name, traces, variant_anchor in variants:
        aligned[name] = _covered(sampled, align(sampled, traces, variant_anchor, source, target))
    aligned["broken alignment"] = [
        _broken(response, trace, own, source, target)
        for response, trace, own in zip(sampled.responses, sampled.behaviour, sampled.own, strict=True)
    ]
    return {name: aligned[name] for name in DENOMINATORS if name in aligned}


def _covered(sampled: Responses, alignments: Sequence[Alignment]) -> list[Floats]:
    return [(own - a.logprobs)[a.covered] for own, a in zip(sampled.own, alignments, strict=True)]


def align(
    sampled: Responses, traces: Sequence[Floats], anchor: Any, source: LazyModel, target: LazyModel
) -> list[Alignment]:
    """Return the alignment of every response's trace with the target's tokens."""
    results = []
    for response, trace in zip(sampled.responses, traces, strict=True):
        alignment = align_logprobs(
            response.text,
            response.source_ids,
            trace,
            source.tokenizer,
            target.tokenizer,
            target_ids=response.target_ids,
            anchor=anchor,
            source_eos_ids=source.engine.eos_token_ids,
            target_eos_ids=target.engine.eos_token_ids,
        )
        results.append(alignment)
    return results


def residual(alignments: Sequence[Alignment]) -> Residual:
    """Return the alignments' losses over responses: delta_THL = |R| (mean, p99, largest), C_mis, the clipped mass and
    the fraction of target tokens without a value."""
    deltas = np.array([a.delta for a in alignments])
    return {
        "delta_thl": float(deltas.mean()),
        "delta_thl_p99": float(np.quantile(deltas, 0.99)),
        "delta_thl_max": float(deltas.max()),
        "mismatched": float(np.mean([a.mismatched for a in alignments])),
        "clipped_mass": float(np.mean([abs(a.clipped) for a in alignments])),
        "uncovered": float(1 - np.concatenate([a.covered for a in alignments]).mean()),
    }


def _broken(response: Response, trace: Floats, own: Floats, source: LazyModel, target: LazyModel) -> Floats:
    """Return the log-ratios under the word map rotated by one: each word gets the mass of the previous word, the first
    that of the last."""
    alignment = align_logprobs(
        response.text,
        response.source_ids,
        trace,
        source.tokenizer,
        target.tokenizer,
        target_ids=response.target_ids,
        anchor="word",
        source_eos_ids=source.engine.eos_token_ids,
        target_eos_ids=target.engine.eos_token_ids,
    )
    rotated = transfer(alignment.units, np.maximum(trace, -BOUND), len(response.target_ids), rotate=1)
    values = rotated.logprobs
    for s, t in alignment.paired:  # the end of sequence is not a word
        values[t] = trace[s]
    covered = ~np.isnan(values)
    return (own - values)[covered]


def token_rows(ratios: dict[str, list[Floats]]) -> list[TokenRatioRow]:
    """Return per denominator: p99 of the token ratio, and the fractions of tokens outside [0.8, 1.2] and of responses
    with a ratio over 10."""
    rows: list[TokenRatioRow] = []
    for name, responses in ratios.items():
        logs = np.concatenate(responses)
        tokens = np.exp(logs)
        tall = [float(np.exp(r).max(initial=0.0)) > TALL for r in responses]
        rows.append(
            {
                "denominator": name,
                "responses": len(responses),
                "tokens": len(tokens),
                "p99": float(np.quantile(tokens, 0.99)),
                "clip_rate": float(np.mean((tokens < LOW) | (tokens > HIGH))),
                "responses_over_10": float(np.mean(tall)),
                "histogram": np.histogram(np.clip(logs, BINS[0], BINS[-1]), BINS)[0].tolist(),
            }
        )
    return rows


def sequence_rows(ratios: dict[str, list[Floats]]) -> list[SequenceRatioRow]:
    """Return per denominator, over responses: exp(mean log-ratio), TRL's `sequence` level, and the log-ratio sum."""
    rows: list[SequenceRatioRow] = []
    for name, responses in ratios.items():
        covered = [r for r in responses if len(r)]
        means, sums = np.array([r.mean() for r in covered]), np.array([r.sum() for r in covered])
        ratio = np.exp(means)
        rows.append(
            {
                "denominator": name,
                "responses": len(covered),
                "median": float(np.median(ratio)),
                "p99": float(np.quantile(ratio, 0.99)),
                "clip_rate": float(np.mean((ratio < LOW) | (ratio > HIGH))),
                "log_sum_median": float(np.median(sums)),
                "log_sum_p99": float(np.quantile(sums, 0.99)),
                "sum_clip_rate": float(np.mean((sums < np.log(LOW)) | (sums > np.log(HIGH)))),
                "histogram": np.histogram(np.clip(means, BINS[0], BINS[-1]), BINS)[0].tolist(),
            }
        )
    return rows
