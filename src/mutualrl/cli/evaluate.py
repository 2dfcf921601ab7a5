"""`mutualrl eval`: accuracy of models, or of existing completions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mutualrl.cli.command import command, given
from mutualrl.cli.output import emit, prose
from mutualrl.console.lines import notify
from mutualrl.console.options import JSON, Option
from mutualrl.evaluation.flags import EvalFlags

SCORERS = ("math-verify",)
WITH_SCORE = ("--score", "--also", "--batch-size", "--step-timeout", "--seed", "--trust-remote-code", "--json")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(EvalFlags):
    """Options of `eval`."""

    out: Annotated[
        Path | None,
        Option("Directory for all completions (Parquet) and the results; the same command resumes."),
    ] = None
    score: Annotated[Path | None, Option("Score a file with columns `completion` and `answer`; no model is run.")] = (
        None
    )
    as_json: Annotated[bool, JSON] = False


@command(EvalOptions)
def evaluate(options: EvalOptions) -> None:
    """Evaluate models: one greedy completion per prompt, exact match of the boxed answer.

    Example: mutualrl eval --model ./a --model ./b --suite math500,arc --data-dir data --out results
    """
    from mutualrl.errors import UsageError

    if unknown := sorted(set(options.also) - set(SCORERS)):
        raise UsageError(f"--also {unknown[0]}: expected {', '.join(SCORERS)}")
    if options.also:
        from mutualrl.evaluation.verify import check_installed

        check_installed()
    if options.score is not None:
        if names := [name for name in given(options) if name not in WITH_SCORE]:
            raise UsageError(f"{', '.join(names)}: no effect with --score, which scores the rows of a file")
        _score(options.score, tuple(dict.fromkeys(options.also)), options.as_json)
        return
    from mutualrl.engines.choice import check_engine
    from mutualrl.evaluation.eval_request import EvalRequest

    check_engine(options.engine)
    request = EvalRequest.of(options)
    from mutualrl.evaluation.eval_tables import markdown
    from mutualrl.evaluation.evaluate import evaluate_models

    results = evaluate_models(request, prose(), options.out)
    if options.as_json:
        emit(results)
    else:
        typer.echo(markdown(results))
    if options.run is not None:
        _save(options.run, results)


def _save(run: Path, results: dict[str, Any]) -> None:
    """Save the results in the run. They have been printed, so a failure to save is only reported."""
    from mutualrl.errors import DiskError
    from mutualrl.evaluation.evaluate import store_in_run
    from mutualrl.storage.files import user_path
    from mutualrl.storage.rundir import RunDirectory

    try:
        notify(f"saved as {store_in_run(RunDirectory(user_path(run)), results)}; `mutualrl report` shows it")
    except (OSError, DiskError) as error:
        notify(f"not saved in the run, so `mutualrl report` will not show it: {error}")


def _score(path: Path, also: tuple[str, ...], as_json: bool) -> None:
    from mutualrl.evaluation.score_file import markdown, score_file

    result = score_file(path, also, prose())
    if as_json:
        emit(result)
    else:
        typer.echo(markdown(result, path))
