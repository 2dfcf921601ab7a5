"""Run a THL check: first the tokenizers of every pair, then the tables that need models."""

from __future__ import annotations

import random
from itertools import islice

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from mutualrl.console.display import cell
from mutualrl.diagnostics.passages import pick
from mutualrl.diagnostics.results import PairCheck, ThlCheck
from mutualrl.diagnostics.thl.endpoints import Endpoint
from mutualrl.diagnostics.thl.example import SENTENCE, example
from mutualrl.diagnostics.thl.length import length
from mutualrl.diagnostics.thl.mass import mass
from mutualrl.diagnostics.thl.ratio import align, log_ratios, residual, sequence_rows, token_rows
from mutualrl.diagnostics.thl.responses import Track, respond
from mutualrl.diagnostics.thl.scripts import scripts
from mutualrl.diagnostics.thl.thl_request import BUNDLED, EXAMPLE, OPENING, SAMPLED, ThlRequest
from mutualrl.diagnostics.thl.traces import LazyModel, OnBatch, common_corpus
from mutualrl.diagnostics.thl.vocabulary import check_vocabularies
from mutualrl.engines.base import Sampling

_TRIES = 4  # draws per opening, since some are duplicates


def check(request: ThlRequest, console: Console) -> ThlCheck:
    """Return `{"safe", "anchor", "seed", "text", "prompts", "pairs": [{"source", "target", "safe", "reasons",
    "tokenizers", and one key per suite}]}`."""
    pool: dict[Endpoint, LazyModel] = {end: LazyModel(end) for pair in request.pairs for end in pair}
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def track(label: str, total: int) -> OnBatch:
            bar = bars.add_task(cell(label), total=total or None)
            return lambda done: bars.advance(bar, done)

        pairs = [_tokenizers(request, pool[a], pool[b], track) for a, b in request.pairs]
        for (a, b), pair in zip(request.pairs, pairs, strict=True):
            if request.suites and pair["tokenizers"]:  # empty when a tokenizer is not supported
                _add_suites(pair, request, pool[a], pool[b], track)
    return {
        "safe": all(pair["safe"] for pair in pairs),
        "anchor": request.anchor,
        "seed": request.seed,
        "text": request.text_name,
        "prompts": request.prompt_name,
        "pairs": pairs,
    }


def _tokenizers(request: ThlRequest, source: LazyModel, target: LazyModel, track: Track) -> PairCheck:
    texts = request.passages if request.limit is None else pick(request.passages, request.limit, request.seed)
    on_text = track(f"{source.name} -> {target.name}: tokenizers", len(texts))
    check = check_vocabularies(
        texts,
        source.tokenizer,
        target.tokenizer,
        request.anchor,
        on_text,
        lambda: (source.end_token, target.end_token),
    )
    return {
        "source": source.name,
        "target": target.name,
        "safe": check["safe"],
        "reasons": check["reasons"],
        "tokenizers": check["figures"],
    }


def _add_suites(pair: PairCheck, request: ThlRequest, source: LazyModel, target: LazyModel, track: Track) -> None:
    label = f"{source.name} -> {target.name}"
    common = (request.passages, source, target, request.anchor)
    if "mass" in request.suites:
        pair["mass"] = mass(*common, request.spans, request.seed, track(f"{label}: mass", 2 * request.spans))
    if "length" in request.suites:
        pair["length"] = length(*common, request.sequences, request.seed, track(f"{label}: length", 0))
    if "scripts" in request.suites:
        texts = request.passages if request.limit is None else pick(request.passages, request.limit, request.seed)
        pair["scripts"] = scripts(texts, source, target, track(f"{label}: scripts", len(texts)))
    if EXAMPLE in request.suites:
        text = SENTENCE if request.text_name == BUNDLED else request.passages[0].strip()
        pair["example"] = example(text, source, target, request.anchor, track(f"{label}: example", 1))
    if set(request.suites) & set(SAMPLED):
        _add_ratios(pair, request, source, target, track)


def _add_ratios(pair: PairCheck, request: ThlRequest, source: LazyModel, target: LazyModel, track: Track) -> None:
    sampling = Sampling(request.max_new_tokens, temperature=1.0, samples=request.samples, seed=request.seed)
    sampled = respond(_prompts(request, source, target), source, target, sampling, track)
    alignments = align(sampled, sampled.behaviour, request.anchor, source, target)
    ratios = log_ratios(sampled, alignments, source, target, request.anchor)
    losses = residual(alignments)
    responses, left_out = len(sampled.responses), sampled.left_out
    if "ratio" in request.suites:
        pair["ratio"] = {"responses": responses, "left_out": left_out, "residual": losses, "rows": token_rows(ratios)}
    if "sequence" in request.suites:
        rows = sequence_rows(ratios)
        pair["sequence"] = {"responses": responses, "left_out": left_out, "residual": losses, "rows": rows}


def _prompts(request: ThlRequest, source: LazyModel, target: LazyModel) -> list[str]:
    """Return the task's prompts, or openings of the text: a few words from random positions."""
    if request.prompts is not None:
        return list(request.prompts)
    corpus, _ = common_corpus(request.passages, source, target)
    rng = random.Random(request.seed)
    drawn = (corpus.words(OPENING, rng) for _ in range(_TRIES * request.prompt_count))
    return list(islice(dict.fromkeys(drawn), request.prompt_count))
