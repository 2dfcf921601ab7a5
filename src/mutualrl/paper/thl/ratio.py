"""Importance ratios on responses sampled by the source. Source: paper, Tables "Token-level ratio statistics ..." and
"THL yields finite sequence-level importance ratios ...".

The numerator is always the target's log-prob of its own tokens of the response, after its own prompt tokens. The
denominators: the source's trace aligned; the source's trace of the same response after another prompt, aligned
(shuffled); a shifted map, where each word gets the mass of the previous one (broken); and the paper's map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import percent, significant, table
from mutualrl.diagnostics.diagnostic import INLINE
from mutualrl.diagnostics.lazy_model import LazyModel
from mutualrl.paper.thl.responses import Response, Responses
from mutualrl.thl import BOUND, Alignment, Anchor, align_logprobs
from mutualrl.thl.transfer import transfer
from mutualrl.thl.units import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOW, HIGH = 0.8, 1.2  # the PPO band at epsilon 0.2
TALL = 10.0
DENOMINATORS = ("aligned", "shuffled prompt", "broken alignment", "paper's map", "paper's map with its fallback")
#: bins of the histograms, natural logarithms of ratios
BINS = np.linspace(-6.0, 6.0, 49)


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of ratios: their p99, the fraction outside [0.8, 1.2], and the counts of their logarithms in
    `BINS`."""

    p99: float
    clip_rate: float
    histogram: list[int]

    @classmethod
    def of(cls, logs: Floats) -> Spread:
        """Return the distribution of ratios, given as logarithms."""
        ratios = np.exp(logs)
        return cls(
            p99=float(np.quantile(ratios, 0.99)),
            clip_rate=float(np.mean((ratios < LOW) | (ratios > HIGH))),
            histogram=np.histogram(np.clip(logs, BINS[0], BINS[-1]), BINS)[0].tolist(),
        )


@dataclass(frozen=True, slots=True)
class TokenRatioRow:
    """Token ratios under one denominator, and the fraction of responses with a ratio over 10."""

    denominator: str
    responses: int
    tokens: int
    spread: Spread = field(metadata=INLINE)
    responses_over_10: float


@dataclass(frozen=True, slots=True)
class SequenceRatioRow:
    """Sequence ratios under one denominator, over responses: exp(mean log-ratio), TRL's `sequence` level, and the sum
    of the log-ratios."""

    denominator: str
    responses: int
    median: float
    spread: Spread = field(metadata=INLINE)
    log_sum_median: float
    log_sum_p99: float
    sum_clip_rate: float


@dataclass(frozen=True, slots=True)
class Residual:
    """Losses of an alignment, over responses: delta_THL, nats; C_mis, tokens; the clipped mass, nats; the fraction of
    target tokens without a value."""

    delta_thl: float
    delta_thl_p99: float
    delta_thl_max: float
    mismatched: float
    clipped_mass: float
    uncovered: float


@dataclass(frozen=True, slots=True)
class TokenRatios:
    """Result of suite `ratio`. `left_out`: responses without a ratio, by reason; `residual`: of the first denominator,
    `aligned`."""

    responses: int
    left_out: Mapping[str, int]
    residual: Residual
    rows: list[TokenRatioRow]


@dataclass(frozen=True, slots=True)
class SequenceRatios:
    """Result of suite `sequence`, with the same fields."""

    responses: int
    left_out: Mapping[str, int]
    residual: Residual
    rows: list[SequenceRatioRow]


def log_ratios(
    sampled: Responses, alignments: Sequence[Alignment], source: LazyModel, target: LazyModel, anchor: Anchor
) -> dict[str, list[Floats]]:
    """Return log-ratios of the covered target tokens of every response, by denominator; `alignments`: of the source's
    trace under the anchor."""
    variants: list[tuple[str, Sequence[Floats], Anchor]] = [("shuffled prompt", sampled.shuffled, anchor)]
    if anchor != "paper":
        variants.append(("paper's map", sampled.behaviour, "paper"))
    if anchor != "paper-fallback":
        variants.append((DENOMINATORS[-1], sampled.behaviour, "paper-fallback"))
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
    sampled: Responses, traces: Sequence[Floats], anchor: Anchor, source: LazyModel, target: LazyModel
) -> list[Alignment]:
    """Return the alignment of every response's trace with the target's tokens."""
    pairs = zip(sampled.responses, traces, strict=True)
    return [_aligned(response, trace, anchor, source, target) for response, trace in pairs]


def _aligned(response: Response, trace: Floats, anchor: Anchor, source: LazyModel, target: LazyModel) -> Alignment:
    """Return the alignment of a response's trace with the target's tokens."""
    return align_logprobs(
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


def residual(alignments: Sequence[Alignment]) -> Residual:
    """Return the alignments' losses over responses: delta_THL = |R| (mean, p99, largest), C_mis, the clipped mass and
    the fraction of target tokens without a value."""
    deltas = np.array([a.delta for a in alignments])
    return Residual(
        delta_thl=float(deltas.mean()),
        delta_thl_p99=float(np.quantile(deltas, 0.99)),
        delta_thl_max=float(deltas.max()),
        mismatched=float(np.mean([a.mismatched for a in alignments])),
        clipped_mass=float(np.mean([abs(a.clipped) for a in alignments])),
        uncovered=float(1 - np.concatenate([a.covered for a in alignments]).mean()),
    )


def _broken(response: Response, trace: Floats, own: Floats, source: LazyModel, target: LazyModel) -> Floats:
    """Return the log-ratios under the word map rotated by one: each word gets the mass of the previous word, the first
    that of the last."""
    alignment = _aligned(response, trace, "word", source, target)
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
        tall = [float(np.exp(r).max(initial=0.0)) > TALL for r in responses]
        rows.append(
            TokenRatioRow(
                denominator=name,
                responses=len(responses),
                tokens=len(logs),
                spread=Spread.of(logs),
                responses_over_10=float(np.mean(tall)),
            )
        )
    return rows


def sequence_rows(ratios: dict[str, list[Floats]]) -> list[SequenceRatioRow]:
    """Return per denominator, over responses: exp(mean log-ratio), TRL's `sequence` level, and the log-ratio sum."""
    rows: list[SequenceRatioRow] = []
    for name, responses in ratios.items():
        covered = [r for r in responses if len(r)]
        means, sums = np.array([r.mean() for r in covered]), np.array([r.sum() for r in covered])
        rows.append(
            SequenceRatioRow(
                denominator=name,
                responses=len(covered),
                median=float(np.median(np.exp(means))),
                spread=Spread.of(means),
                log_sum_median=float(np.median(sums)),
                log_sum_p99=float(np.quantile(sums, 0.99)),
                sum_clip_rate=float(np.mean((sums < np.log(LOW)) | (sums > np.log(HIGH)))),
            )
        )
    return rows


def token_markdown(pairs: Sequence[tuple[str, TokenRatios]]) -> str:
    """Return the ratios of all pairs, and the losses of aligning the responses. `pairs`: with their labels."""
    rows, losses = [], []
    for label, result in pairs:
        for row in result.rows:
            counts = [row.denominator, str(row.responses), str(row.tokens)]
            rows.append(
                [
                    label,
                    *counts,
                    significant(row.spread.p99),
                    f"{row.spread.clip_rate:.4f}",
                    f"{row.responses_over_10:.4f}",
                ]
            )
        lost = result.residual
        nats = [lost.delta_thl, lost.delta_thl_p99, lost.delta_thl_max, lost.mismatched, lost.clipped_mass]
        losses.append([label, *map(significant, nats), percent(lost.uncovered)])
    head = ["pair", "denominator", "responses", "tokens", "token ratio p99", "clip rate", "responses with a ratio > 10"]
    parts = [table("ratio: token-level importance ratios", head, rows)]
    head = ["pair", "delta_THL (nats)", "p99", "max", "C_mis (tokens)", "clipped mass (nats)", "uncovered tokens (%)"]
    parts.append(table("residual: mass of a response's trace that no token received", head, losses))
    return "\n\n".join(parts)


def sequence_markdown(pairs: Sequence[tuple[str, SequenceRatios]]) -> str:
    """Return the table of all pairs. `pairs`: with their labels."""
    rows = []
    for label, result in pairs:
        for row in result.rows:
            ratios = [f"{value:.4f}" for value in (row.median, row.spread.p99, row.spread.clip_rate)]
            sums = [f"{value:.2f}" for value in (row.log_sum_median, row.log_sum_p99)]
            rows.append([label, row.denominator, str(row.responses), *ratios, *sums])
    head = ["pair", "denominator", "responses", "median", "p99", "clip rate", "log of exp(sum): median", "p99"]
    return table("sequence: exp(mean log-ratio) of a response", head, rows)


def histogram(label: str) -> Callable[[Axes, TokenRatios | SequenceRatios], None]:
    """Return what draws the histogram of log-ratios of each denominator."""

    def draw(axis: Axes, result: TokenRatios | SequenceRatios) -> None:
        for row in result.rows:
            counts = np.array(row.spread.histogram) / max(1, sum(row.spread.histogram))
            axis.stairs(counts, BINS, label=row.denominator)
        axis.axvspan(np.log(0.8), np.log(1.2), alpha=0.15)
        axis.set(yscale="log", xlabel=label, ylabel="fraction")
        axis.legend(fontsize=7)

    return draw
