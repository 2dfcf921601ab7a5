"""`mutualrl eval`: how good models are, or how good existing completions are."""

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
        help="A run directory: every policy's trained model.", show_default=False, autocompletion=run_directories
    ),
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option(help="A model (path, hub id, tiny:NAME); may be given several times.", show_default=False),
]
PoolOption = Annotated[
    str | None,
    typer.Option(
        help="The models of a pool, as they are before training.", show_default=False, autocompletion=pool_names
    ),
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        help="Tasks with commas between (`mutualrl tasks ls`), or `paper`: its seven. A run's own by default.",
        show_default=False,
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(help="The rows of one task: a file, a directory, or hub:OWNER/NAME.", show_default=False),
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="A directory with the tasks' files, in place of the hub.", show_default=False)
]
LimitOption = Annotated[
    int | None,
    typer.Option(min=1, help="At most so many prompts per task, of every group its share.", show_default=False),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest completion: on its own task a run's or pool's, else 3072 (arithmetic: 64).",
        show_default=False,
    ),
]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Completions a prompt, for pass@k (1).", show_default=False)
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=10.0, help="0 is greedy; 1 where several samples are asked for.", show_default=False),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        help="transformers, or vllm; by default vllm where it is installed and runs the model.", show_default=False
    ),
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Completions at a time, with transformers.")]
TemplateOption = Annotated[
    str | None, typer.Option(help="Task dataset: the prompt, {field} for a field of the row.", show_default=False)
]
AnswerOption = Annotated[
    str | None, typer.Option(help="Task dataset: the field that is the answer (answer).", show_default=False)
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Keep every completion (Parquet) and the results; the same command resumes after a kill.",
        show_default=False,
    ),
]
ScoreOption = Annotated[
    Path | None,
    typer.Option(help="Score the rows of a file, `completion` and `answer`; no model.", show_default=False),
]
AlsoOption = Annotated[
    list[str] | None, typer.Option(help="A further score beside exact match: math-verify.", show_default=False)
]
StepTimeoutOption = Annotated[
    float, typer.Option(min=0.001, help="Seconds that a reward function may take for a part, at most.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of sampling and of generated problems.")]


@reports_errors
def evaluate(
    run: RunOption = None,
    model: ModelOption = None,
    pool: PoolOption = None,
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
        idle = {
            "--run": run, "--model": model, "--pool": pool, "--suite": suite, "--data": data, "--data-dir": data_dir,
            "--limit": limit, "--max-new-tokens": max_new_tokens, "--samples": samples, "--temperature": temperature,
            "--engine": engine, "--template": template, "--answer": answer, "--out": out,
        }  # fmt: skip
        if given := [flag for flag, value in idle.items() if value not in (None, [])]:
            raise UsageError(f"{', '.join(given)}: no effect with --score, which reads the file's rows and no model")
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
        _keep(run, results)


def _keep(run: Path, results: dict[str, Any]) -> None:
    """Write the results into the run. They are printed already, so that a failure to keep them is no error."""
    from mutualrl.errors import DiskError
    from mutualrl.evaluation.evaluate import keep_in_run
    from mutualrl.storage.files import user_path
    from mutualrl.storage.rundir import RunDirectory

    try:
        notify(f"kept as {keep_in_run(RunDirectory(user_path(run)), results)}; `mutualrl report` draws it")
    except (OSError, DiskError) as error:
        notify(f"not kept in the run, so that `mutualrl report` will not draw it: {error}")


def _score(path: Path, also: tuple[str, ...], as_json: bool) -> None:
    from mutualrl.evaluation.score_file import markdown, score_file

    result = score_file(path, also, prose())
    if as_json:
        emit(result)
    else:
        typer.echo(markdown(result, path))
