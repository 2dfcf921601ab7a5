"""Options of `thl-check`, also for use from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import SEED_LIMIT, TRUST_REMOTE_CODE, Option


@dataclass(frozen=True, kw_only=True)
class ThlFlags:
    """Options of the check; None: not given."""

    pool: Annotated[str | None, Option("All ordered pairs of a pool; `tiny` by default.")] = None
    source: Annotated[str | None, Option("Sampling model or its tokenizer (directory, hub id, tiny:NAME).")] = None
    target: Annotated[str | None, Option("Learning model or its tokenizer.")] = None
    text: Annotated[Path | None, Option("JSON Lines with `text`, or plain text; by default a bundled text.")] = None
    task: Annotated[str | None, Option("Task of the prompts (the pool's, or openings of the text).")] = None
    data: Annotated[Path | None, Option("The task's rows (JSON Lines).")] = None
    prompts: Annotated[int | None, Option("Maximum number of prompts (256).", min=2)] = None
    samples: Annotated[int | None, Option("Responses per prompt (5).", min=1)] = None
    max_new_tokens: Annotated[int | None, Option("Maximum response length in tokens (the pool's, or 64).", min=1)] = (
        None
    )
    suite: Annotated[
        str | None,
        Option(
            "tokenizers (no model needed), mass, length, scripts, ratio, sequence, all (default, of models: these); "
            "example: one text, word by word."
        ),
    ] = None
    anchor: Annotated[str | None, Option("Alignment: span (default), word, char, paper, paper-fallback.")] = None
    limit: Annotated[int | None, Option("Maximum number of texts, spans, sequences, prompts per suite.", min=1)] = None
    seed: Annotated[int, Option("Seed of draws and sampling.", min=0, max=SEED_LIMIT)] = 0
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
