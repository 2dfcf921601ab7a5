"""`mutualrl eval`: greedy accuracy of trained or other models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.output import emit, prose, reports_errors


@reports_errors
def evaluate(
    run: Annotated[
        Path | None, typer.Option(help="A run directory: every policy's trained model.", show_default=False)
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model (path, hub id, tiny:NAME); may be given several times.", show_default=False),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Task: arithmetic, math, dataset. A run's own by default.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Rows to evaluate on (JSON Lines), for tasks that read a file.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many prompts, evenly spaced.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest completion: a run's own, else 64 for arithmetic, 1024 for math.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated problems.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Evaluate models: one greedy completion a prompt, exact match of the boxed answer."""
    from mutualrl.evaluation.request import EvalRequest

    request = EvalRequest.of(
        run=run, models=tuple(model or ()), suite=suite, data=data, limit=limit, max_new_tokens=max_new_tokens,
        seed=seed, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    from mutualrl.evaluation.run import evaluate_models, show

    results = evaluate_models(request, prose())
    if as_json:
        emit(results)
    else:
        show(results)
