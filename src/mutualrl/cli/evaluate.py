"""`mutualrl eval`: accuracy of models, or of existing completions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import typer

from mutualrl.cli.commands import Eval
from mutualrl.cli.output import emit, prose
from mutualrl.console.lines import notify
from mutualrl.console.options import arguments_of, given
from mutualrl.console.user_path import user_path
from mutualrl.engines.choice import check_engine
from mutualrl.errors import DiskError, UsageError
from mutualrl.evaluation import eval_tables, score_file
from mutualrl.evaluation.eval_request import EvalRequest
from mutualrl.evaluation.evaluate import evaluate_models, store_in_run
from mutualrl.evaluation.verify import check_installed
from mutualrl.process.child_result import RESULT_FILE, result_of_child, write_result
from mutualrl.process.plugins import is_import_path
from mutualrl.recipes import Request, resolve
from mutualrl.runs.read import read_run
from mutualrl.storage.files import JsonObject
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
    if (target := os.environ.pop(RESULT_FILE, None)) is not None:
        write_result(Path(target), lambda: evaluate_models(EvalRequest.of(options), prose(), options.out))
        return
    if _runs_user_code(options):
        results = result_of_child(["eval", *arguments_of(replace(options, as_json=False))], ENDED)
    else:
        results = evaluate_models(EvalRequest.of(options), prose(), options.out)
    _print(results, eval_tables.markdown(results), as_json=options.as_json)
    if options.run is not None:
        _save(options.run, results)


ENDED = "the evaluation ended without a result: a reward function, or other code that it runs, ended the process"


def _runs_user_code(options: Eval) -> bool:
    """Return whether an evaluation calls code of the user's, which may end its process or leave threads behind: it then
    has a process of its own, and only a complete result is one."""
    names, rewards = [*(options.suite or "").split(",")], ["boxed"]
    if options.run is not None:
        run = read_run(options.run)
        names.append(str(run.setting("task.name")))
        given = run.setting("task.reward")
        rewards = given if isinstance(given, list) else ["boxed" if given is None else str(given)]
    elif options.pool is not None:
        task = resolve(Request(pool=options.pool)).task
        names, rewards = [*names, task.name], list(task.reward)
    return rewards != ["boxed"] or any(is_import_path(name) for name in names)


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
