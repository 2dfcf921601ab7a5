"""`mutualrl eval`: accuracy of models, or of existing completions."""

from __future__ import annotations

from pathlib import Path

import typer

from mutualrl.cli.commands import Eval
from mutualrl.cli.output import emit, prose
from mutualrl.console.lines import notify
from mutualrl.console.options import given
from mutualrl.engines.choice import check_engine
from mutualrl.errors import DiskError, UsageError
from mutualrl.evaluation import eval_tables, score_file
from mutualrl.evaluation.eval_request import EvalRequest
from mutualrl.evaluation.evaluate import evaluate_models, store_in_run
from mutualrl.evaluation.verify import check_installed
from mutualrl.storage.files import JsonObject, user_path
from mutualrl.storage.rundir import RunDirectory

SCORERS = ("math-verify",)
WITH_SCORE = ("--score", "--also", "--batch-size", "--step-timeout", "--seed", "--trust-remote-code", "--json")


def evaluate(options: Eval) -> None:
    """Evaluate models, or score a file of completions, and print accuracies."""
    if unknown := sorted(set(options.also) - set(SCORERS)):
        raise UsageError(f"--also {unknown[0]}: expected {', '.join(SCORERS)}")
    if options.also:
        check_installed()
    if options.score is not None:
        if names := [name for name in given(options) if name not in WITH_SCORE]:
            raise UsageError(f"{', '.join(names)}: no effect with --score, which scores the rows of a file")
        result = score_file.score_file(options.score, tuple(dict.fromkeys(options.also)), prose())
        _print(result, score_file.markdown(result, options.score), as_json=options.as_json)
        return
    check_engine(options.engine)
    results = evaluate_models(EvalRequest.of(options), prose(), options.out)
    _print(results, eval_tables.markdown(results), as_json=options.as_json)
    if options.run is not None:
        _save(options.run, results)


def _print(result: JsonObject, text: str, *, as_json: bool) -> None:
    if as_json:
        emit(result)
    else:
        typer.echo(text)


def _save(run: Path, results: JsonObject) -> None:
    """Save the results in the run. They have been printed, so a failure to save is only reported."""
    try:
        notify(f"saved as {store_in_run(RunDirectory(user_path(run)), results)}; `mutualrl report` shows it")
    except (OSError, DiskError) as error:
        notify(f"not saved in the run, so `mutualrl report` will not show it: {error}")
