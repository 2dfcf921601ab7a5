"""`mutualrl paper distill`: the paper's control, fine-tuning on peers' successes after reinforcement learning."""

from __future__ import annotations

import contextlib
import sys

import typer

from mutualrl.cli.commands import Distill
from mutualrl.cli.output import emit, prose
from mutualrl.engines.choice import check_engine
from mutualrl.paper.distillation.distill import distill as run_distillation
from mutualrl.paper.distillation.distill import markdown
from mutualrl.study.distill_settings import parse_settings


def distill(options: Distill) -> None:
    """Fine-tune every policy, and print the accuracies before and after."""
    check_engine(options.engine)
    settings = parse_settings(options.start, options.seed, options.assignments)
    with contextlib.redirect_stdout(sys.stderr):  # otherwise DeepSpeed, which TRL imports, logs to stdout
        result = run_distillation(options.runs, options.beside, options.out, settings, options.engine, prose())
    if options.as_json:
        emit(result)
    else:
        typer.echo(markdown(result))
