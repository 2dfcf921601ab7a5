"""Check whether models can exchange traces: their tokenizers, then the paper's tables on THL.

Each suite is a module with its result, its table and its figure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from mutualrl.console.display import cell
from mutualrl.console.plots import save
from mutualrl.diagnostics.diagnostic import as_plain
from mutualrl.diagnostics.endpoints import Endpoint
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.diagnostics.passages import pick
from mutualrl.diagnostics.vocabulary import (
    TokenizerCheck,
    check_models,
    direction,
    draw_groups,
    tokenizer_table,
    verdict,
)
from mutualrl.paper.thl import example, length, mass, ratio, scripts
from mutualrl.paper.thl.plan import BUNDLED, EXAMPLE, OPENING, SAMPLED, SEQUENCES, SPANS, ThlPlan, plan_check
from mutualrl.paper.thl.request import ThlRequest
from mutualrl.paper.thl.responses import Track, respond
from mutualrl.paper.thl.traces import Pair, common_corpus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRIES = 4  # draws per opening, since some are duplicates


class Suite(NamedTuple):
    """What shows a suite: its table of all pairs, given with their labels, and its figure of one pair."""

    markdown: Callable[[Sequence[tuple[str, Any]]], str]
    draw: Callable[[Axes, Any], None] | None = None


SUITES = {
    "mass": Suite(mass.markdown, mass.draw),
    "length": Suite(length.markdown, length.draw),
    "scripts": Suite(scripts.markdown, scripts.draw),
    "ratio": Suite(ratio.token_markdown, ratio.histogram("log of the token ratio")),
    "sequence": Suite(ratio.sequence_markdown, ratio.histogram("mean log-ratio of a response")),
    "example": Suite(example.markdown),
}


@dataclass(frozen=True)
class PairCheck:
    """An ordered pair of models: their tokenizers, and the results of the requested suites by name."""

    source: str
    target: str
    tokenizers: TokenizerCheck
    suites: dict[str, object]

    def plain(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        check = self.tokenizers
        figures = {} if check.figures is None else as_plain(check.figures)
        names = {"source": self.source, "target": self.target}
        found = {"safe": check.safe, "reasons": list(check.reasons), "tokenizers": figures}
        return {**names, **found, **as_plain(self.suites)}


@dataclass(frozen=True)
class ThlReport:
    """Result of `thl-check`."""

    plan: ThlPlan
    pairs: tuple[PairCheck, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "safe": all(pair.tokenizers.safe for pair in self.pairs),
            "anchor": self.plan.anchor,
            "seed": self.plan.seed,
            "text": self.plan.text_name,
            "prompts": self.plan.prompt_name,
            "pairs": [pair.plain() for pair in self.pairs],
        }

    def markdown(self) -> str:
        """Return the verdict, then all tables."""
        labelled = [(direction(pair.source, pair.target), pair) for pair in self.pairs]
        checks = [(label, pair.tokenizers) for label, pair in labelled]
        parts = [verdict(checks), tokenizer_table(checks)]
        for name, suite in SUITES.items():
            results = [(label, pair.suites[name]) for label, pair in labelled if name in pair.suites]
            parts += [suite.markdown(results)] if results else []
        return "\n\n".join(parts)

    def plot(self, directory: Path) -> list[Path]:
        """Draw a figure of each suite that ran, one PNG and one SVG; return the files."""
        groups = [(pair, pair.tokenizers.figures) for pair in self.pairs if pair.tokenizers.figures is not None]
        files = _drawn("tokenizers", draw_groups, groups, directory)
        for name, suite in SUITES.items():
            results = [(pair, pair.suites[name]) for pair in self.pairs if name in pair.suites]
            if suite.draw is not None:
                files += _drawn(name, suite.draw, results, directory)
        return files


def _drawn(
    name: str, draw: Callable[[Axes, Any], None], results: Sequence[tuple[PairCheck, Any]], directory: Path
) -> list[Path]:
    """Draw one figure with an axis per pair; return its files, none without results."""
    import matplotlib.pyplot as plt

    if not results:
        return []
    size = (5.5 * len(results), 4)
    figure, axes = plt.subplots(1, len(results), figsize=size, squeeze=False, layout="constrained")
    for axis, (pair, result) in zip(axes[0], results, strict=True):
        axis.set_title(f"{pair.source} → {pair.target}", fontsize=10, parse_math=False)
        draw(axis, result)
    return save(figure, directory, name)


def check(request: ThlRequest, console: Console) -> ThlReport:
    """Return the tokenizers of all pairs, and the requested suites of those that can be compared."""
    plan = plan_check(request)
    pool: dict[Endpoint, LazyModel] = {end: LazyModel(end) for pair in plan.pairs for end in pair}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def track(label: str, total: int) -> OnBatch:
            bar = bars.add_task(cell(label), total=total or None)
            return lambda done: bars.advance(bar, done)

        checked = [(pool[a], pool[b], _tokenizers(plan, pool[a], pool[b], track)) for a, b in plan.pairs]
        pairs = []
        for source, target, found in checked:
            results = {} if found.figures is None else _suites(plan, source, target, track)
            pairs.append(PairCheck(source.name, target.name, found, results))
    return ThlReport(plan, tuple(pairs))


def _tokenizers(plan: ThlPlan, source: LazyModel, target: LazyModel, track: Track) -> TokenizerCheck:
    texts = plan.passages if plan.request.limit is None else pick(plan.passages, plan.request.limit, plan.seed)
    on_text = track(f"{source.name} -> {target.name}: tokenizers", len(texts))
    return check_models(texts, source, target, plan.anchor, on_text)


def _suites(plan: ThlPlan, source: LazyModel, target: LazyModel, track: Track) -> dict[str, object]:
    """Return the results of the requested suites."""
    results: dict[str, object] = {}
    label = f"{source.name} -> {target.name}"
    pair = Pair(source, target, plan.anchor)
    if "mass" in plan.suites:
        on_batch = track(f"{label}: mass", 2 * plan.at_most(SPANS))
        results["mass"] = mass.mass(plan.passages, pair, plan.at_most(SPANS), plan.seed, on_batch)
    if "length" in plan.suites:
        results["length"] = length.length(
            plan.passages, pair, plan.at_most(SEQUENCES), plan.seed, track(f"{label}: length", 0)
        )
    if "scripts" in plan.suites:
        texts = plan.passages if plan.request.limit is None else pick(plan.passages, plan.request.limit, plan.seed)
        results["scripts"] = scripts.scripts(texts, source, target, track(f"{label}: scripts", len(texts)))
    if EXAMPLE in plan.suites:
        text = example.SENTENCE if plan.text_name == BUNDLED else plan.passages[0].strip()
        results[EXAMPLE] = example.example(text, source, target, plan.anchor, track(f"{label}: example", 1))
    if set(plan.suites) & set(SAMPLED):
        results |= _ratios(plan, source, target, track)
    return results


def _ratios(plan: ThlPlan, source: LazyModel, target: LazyModel, track: Track) -> dict[str, object]:
    """Return the ratios on sampled responses, of tokens and of sequences."""
    sampled = respond(_prompts(plan, source, target), source, target, plan.sampling, track)
    alignments = ratio.align(sampled, sampled.behaviour, plan.anchor, source, target)
    ratios = ratio.log_ratios(sampled, alignments, source, target, plan.anchor)
    common = (len(sampled.responses), sampled.left_out, ratio.residual(alignments))
    results: dict[str, object] = {}
    if "ratio" in plan.suites:
        results["ratio"] = ratio.TokenRatios(*common, ratio.token_rows(ratios))
    if "sequence" in plan.suites:
        results["sequence"] = ratio.SequenceRatios(*common, ratio.sequence_rows(ratios))
    return results


def _prompts(plan: ThlPlan, source: LazyModel, target: LazyModel) -> list[str]:
    """Return the task's prompts, or openings of the text: a few words from random positions."""
    if plan.prompts is not None:
        return list(plan.prompts)
    corpus, _ = common_corpus(plan.passages, source, target)
    rng = random.Random(plan.seed)
    drawn = (corpus.words(OPENING, rng) for _ in range(_TRIES * plan.prompt_count))
    return list(islice(dict.fromkeys(drawn), plan.prompt_count))
