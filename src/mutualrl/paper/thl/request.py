"""Request of `thl-check`, which is its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import SEED_LIMIT, TRUST_REMOTE_CODE, Option, OptionGroup, WithPlot
from mutualrl.engines.sampling import SamplingOptions
from mutualrl.recipes.request import Request


@dataclass(frozen=True, kw_only=True)
class ThlRequest(WithPlot):
    """Check whether models can exchange traces: their tokenizers, then the paper's tables on THL.

    Exits with 3 if a pair is unsafe, and prints the reason.
    Example: mutualrl thl-check --source A --target B --suite tokenizers
    """

    asked: Annotated[
        Request,
        OptionGroup(
            *("pool", "task", "data"),
            pool=Option("All ordered pairs of a pool; `tiny` by default."),
            task=Option("Task of the prompts (the pool's, or openings of the text)."),
            data=Option("The task's rows (JSON Lines)."),
        ),
    ] = Request()
    source: Annotated[str | None, Option("Sampling model or its tokenizer (directory, hub id, tiny:NAME).")] = None
    target: Annotated[str | None, Option("Learning model or its tokenizer.")] = None
    text: Annotated[Path | None, Option("JSON Lines with `text`, or plain text; by default a bundled text.")] = None
    prompts: Annotated[int | None, Option("Maximum number of prompts (256).", min=2)] = None
    sampling: Annotated[
        SamplingOptions,
        OptionGroup(
            *("samples", "max_new_tokens", "seed"),
            samples=Option("Responses per prompt (5).", min=1),
            max_new_tokens=Option("Maximum response length in tokens (the pool's, or 64).", min=1),
            seed=Option("Seed of draws and sampling.", min=0, max=SEED_LIMIT),
        ),
    ] = SamplingOptions()
    suite: Annotated[
        str | None,
        Option(
            "tokenizers (no model needed), mass, length, scripts, ratio, sequence, all (default, of models: these); "
            "example: one text, word by word; turns: what chat templates keep of conversations with tools and "
            "reasoning (names of models, or files *.jinja)."
        ),
    ] = None
    conversations: Annotated[
        Path | None,
        Option("Conversations for the suite turns: rows with `messages` and `tools`; nine kinds by default."),
    ] = None
    anchor: Annotated[str | None, Option("Alignment: span (default), word, char, paper, paper-fallback.")] = None
    limit: Annotated[int | None, Option("Maximum number of texts, spans, sequences, prompts per suite.", min=1)] = None
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
