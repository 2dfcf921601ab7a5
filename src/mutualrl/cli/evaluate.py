"""`mutualrl eval`: accuracy of models, or of existing completions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mutualrl.cli.completion import pool_names, run_directories
from mutualrl.cli.options import JsonFlag, TrustRemoteCode
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.console.lines import notify

SCORERS = ("math-verify",)


RunOption = Annotated[
    Path | None,
    typer.Option(
        help="A run directory: the trained models of its policies.",
        show_default=False,
        autocompletion=run_directories,
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(help="A model (path, hub id, tiny:NAME). Repeatable.", show_default=False),
]
PoolOption = Annotated[
    str | None,
    typer.Option(help="The models of a pool, before training.", show_default=False, autocompletion=pool_names),
]
InitialFlag = Annotated[
    bool, typer.Option("--initial", help="With --run: its models before training, for the report's first bars.")
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated tasks (`mutualrl tasks ls`), or `paper`: its seven. A run's task by default.",
        show_default=False,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="The rows of one task: a file, a directory, or hub:OWNER/NAME.", show_default=False),
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="A directory with the tasks' files, instead of the hub.", show_default=False)
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of prompts per task, stratified by group.", show_default=False),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum completion length: a run's or pool's on its own task, else 3072 (arithmetic: 64).",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Completions per prompt, for pass@k (1).", show_default=False)
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=10.0, help="0 is greedy, the default; 1 with several --samples.", show_default=False),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        help="transformers or vllm; by default vllm if it is installed and supports the model.", show_default=False
    ),
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Batch size of the transformers engine.")]
TemplateOption = Annotated[
    str | None, typer.Option(help="Task dataset: prompt template, {field} for a field of the row.", show_default=False)
]
AnswerOption = Annotated[
    str | None, typer.Option(help="Task dataset: field of the answer (answer).", show_default=False)
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory for all completions (Parquet) and the results; the same command resumes.",
        show_default=False,
    ),
]
ScoreOption = Annotated[
    Path | None,
    typer.Option(help="Score a file with columns `completion` and `answer`; no model is run.", show_default=False),
]
AlsoOption = Annotated[
    list[str] | None, typer.Option(help="Additional score besides exact match: math-verify.", show_default=False)
]
StepTimeoutOption = Annotated[
    float, typer.Option(min=0.001, help="Time-out of a reward function per part, in seconds.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of sampling and of generated problems.")]


@reports_errors
def evaluate(
    run: RunOption = None,
    model: ModelOption = None,
    pool: PoolOption = None,
    initial: InitialFlag = False,
    suite: SuiteOption = None,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    limit: LimitOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    samples: SamplesOption = None,
    temperature: TemperatureOption = None,
    engine: EngineOption = None,
    batch_size: BatchSizeOption = 64,
    template: TemplateOption = None,
    answer: AnswerOption = None,
    out: OutOption = None,
    score: ScoreOption = None,
    also: AlsoOption = None,
    step_timeout: StepTimeoutOption = 1800.0,
    seed: SeedOption = 0,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate models: one greedy completion per prompt, exact match of the boxed answer.

    Example: mutualrl eval --model ./a --model ./b --suite math500,arc --data-dir data --out results
    """
    from mutualrl.errors import UsageError

    extra = tuple(dict.fromkeys(also or ()))
    if unknown := sorted(set(extra) - set(SCORERS)):
        raise UsageError(f"--also {unknown[0]}: expected {', '.join(SCORERS)}")
    if extra:
        from mutualrl.evaluation.verify import check_installed

        check_installed()
    if score is not None:
        ignored = {
            "--run": run, "--model": model, "--pool": pool, "--initial": initial or None, "--suite": suite,
            "--data": data, "--data-dir": data_dir, "--limit": limit, "--max-new-tokens": max_new_tokens,
            "--samples": samples, "--temperature": temperature, "--engine": engine,
            "--template": template, "--answer": answer, "--out": out,
        }  # fmt: skip
        if flags := [flag for flag, value in ignored.items() if value not in (None, [])]:
            raise UsageError(f"{', '.join(flags)}: no effect with --score, which scores the rows of a file")
        _score(score, extra, as_json)
        return
    from mutualrl.engines.choice import check_engine
    from mutualrl.evaluation.eval_request import EvalFlags, EvalRequest

    check_engine(engine)
    request = EvalRequest.of(
        EvalFlags(
            run=run,
            models=tuple(model or ()),
            pool=pool,
            initial=initial,
            suite=suite,
            data=data,
            data_dir=data_dir,
            limit=limit,
            max_new_tokens=max_new_tokens,
            samples=samples,
            temperature=temperature,
            engine=engine,
            batch_size=batch_size,
            seed=seed,
            template=template,
            answer=answer,
            also=extra,
            step_timeout=step_timeout,
            trust_remote_code=trust_remote_code,
        )
    )
    from mutualrl.evaluation.eval_tables import markdown
    from mutualrl.evaluation.evaluate import evaluate_models

    results = evaluate_models(request, prose(), out)
    if as_json:
        emit(results)
    else:
        typer.echo(markdown(results))
    if run is not None:
        _save(run, results)


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
