"""`mutualrl eval`: accuracy of models, or of existing completions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import typer

from mutualrl.cli.output import emit, prose
from mutualrl.console.lines import notify
from mutualrl.console.options import arguments_of, given
from mutualrl.console.user_path import user_path
from mutualrl.engines.choice import check_engine
from mutualrl.errors import DiskError, UsageError
from mutualrl.evaluation import eval_tables, score_file
from mutualrl.evaluation.evaluate import evaluate_models, store_in_run
from mutualrl.evaluation.request import EvalRequest
from mutualrl.evaluation.verify import check_installed
from mutualrl.process.child_result import RESULT_FILE, result_of_child, write_result
from mutualrl.process.plugins import is_import_path
from mutualrl.recipes import Request, resolve
from mutualrl.runs.read import read_run
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import RunDirectory

SCORERS = ("math-verify",)
WITH_SCORE = ("--score", "--also", "--batch-size", "--step-timeout", "--seed", "--trust-remote-code", "--json")


def evaluate(request: EvalRequest) -> None:
    """Evaluate models, or score a file of completions, and print accuracies."""
    if unknown := sorted(set(request.also) - set(SCORERS)):
        raise UsageError(f"--also {unknown[0]}: expected {', '.join(SCORERS)}")
    if request.also:
        check_installed()
    if request.score is not None:
        if names := [name for name in given(request) if name not in WITH_SCORE]:
            raise UsageError(f"{', '.join(names)}: no effect with --score, which scores the rows of a file")
        result = score_file.score_file(request.score, tuple(dict.fromkeys(request.also)), prose())
        _print(result, score_file.markdown(result, request.score), as_json=request.as_json)
        return
    check_engine(request.sampling.engine)
    if (target := os.environ.pop(RESULT_FILE, None)) is not None:
        write_result(Path(target), lambda: evaluate_models(request, prose()))
        return
    if _runs_user_code(request):
        results = result_of_child(["eval", *arguments_of(replace(request, as_json=False))], ENDED)
    else:
        results = evaluate_models(request, prose())
    _print(results, eval_tables.markdown(results), as_json=request.as_json)
    if request.run is not None:
        _save(request.run, results)


ENDED = "the evaluation ended without a result: a reward function, or other code that it runs, ended the process"


def _runs_user_code(request: EvalRequest) -> bool:
    """Return whether an evaluation calls code of the user's, which may end its process or leave threads behind: it then
    has a process of its own, and only a complete result is one."""
    names, rewards, turns = [*(request.suite or "").split(",")], ["boxed"], False
    if request.run is not None:
        run = read_run(request.run)
        names.append(str(run.setting("task.name")))
        given = run.setting("task.reward")
        rewards = given if isinstance(given, list) else ["boxed" if given is None else str(given)]
        turns = bool(run.setting("task.environment") or run.setting("task.tools"))
    elif request.pool is not None:
        task = resolve(Request(pool=request.pool)).task
        names, rewards, turns = [*names, task.name], list(task.reward), task.has_turns
    return turns or rewards != ["boxed"] or any(is_import_path(name) for name in names)


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
