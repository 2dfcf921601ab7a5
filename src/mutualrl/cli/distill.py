"""`mutualrl distill`: the paper's control, fine-tuning on peers' successes after reinforcement learning."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors


@reports_errors
def distill(
    runs: Annotated[
        list[Path], typer.Argument(help="Standalone runs (train --regime grpo --exchange full).", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="New directory for the models and distill.json.")] = Path("runs/distill"),
    start: Annotated[str, typer.Option(help="Models to fine-tune: trained (after RL), or base.")] = "trained",
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="A run whose models are also compared, such as SGT's. Repeatable.", show_default=False),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="learning_rate, epochs, batch_size, limit, lora.r, trainer.KEY of TRL's SFTConfig, ...",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the fine-tuning.")] = 0,
    engine: Annotated[
        str | None, typer.Option(help="transformers or vllm (vllm if it supports the model).", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Sequential Peer Distillation: fine-tune each policy on its peers' successes, after plain GRPO.

    Example: mutualrl distill runs/grpo --beside runs/sgt --out runs/distilled
    """
    from mutualrl.distillation.settings import parse_settings
    from mutualrl.engines.choice import check_engine

    check_engine(engine)
    settings = parse_settings(start, seed, assignments or [])

    from mutualrl.distillation.distill import distill as run_distillation
    from mutualrl.distillation.distill import markdown

    with contextlib.redirect_stdout(sys.stderr):  # otherwise DeepSpeed, which TRL imports, logs to stdout
        result = run_distillation(runs, beside or [], out, settings, engine, prose())
    if as_json:
        emit(result)
    else:
        typer.echo(markdown(result))
