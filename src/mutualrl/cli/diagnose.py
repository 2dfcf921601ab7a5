"""Diagnostics of a pool: `complementarity`, `xgrpo-check`, `sgt-check`, `channels`, `cost`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.options import JsonFlag, TrustRemoteCode
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.console.display import print_text

Run = Annotated[Path | None, typer.Option(help="Use the rollouts of a run's exchange.", show_default=False)]
RolloutFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="JSON Lines or Parquet: prompt_id, reward, policy (without it, one file per model). Repeatable.",
        show_default=False,
    ),
]
Pool = Annotated[str | None, typer.Option(help="Sample from the models of a pool (tiny).", show_default=False)]
Task = Annotated[str | None, typer.Option(help="Task of the prompts (the pool's).", show_default=False)]
Data = Annotated[
    Path | None, typer.Option(help="The task's rows: a file, a directory, or hub:OWNER/NAME.", show_default=False)
]
Prompts = Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts (256).", show_default=False)]
Samples = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Rollouts per prompt (the pool's group size).", show_default=False)
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum response length in tokens (the pool's).", show_default=False)
]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, max=10.0, help="Sampling temperature (1).", show_default=False)
]
Engine = Annotated[
    str | None, typer.Option(help="transformers or vllm (vllm if it supports the model).", show_default=False)
]
Rounds = Annotated[str | None, typer.Option(help="Rounds of a run, FIRST:LAST inclusive (all).", show_default=False)]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="POLICY=PATH: the model that sampled; by default a run's trained models.", show_default=False
    ),
]
PoolModels = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="MODEL", help="Sample from this model. Repeatable.", show_default=False),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="NAME=recorded:FILE",
        help="Recorded texts (also a file of --rollouts without rewards). Repeatable.",
        show_default=False,
    ),
]
SourceKeys = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key of a source, such as sources.NAME.columns.text=COLUMN."),
]
Save = Annotated[
    Path | None, typer.Option(help="Save the sampled rollouts (.parquet), for --rollouts.", show_default=False)
]
Plot = Annotated[Path | None, typer.Option(help="Write figures to this directory.", show_default=False)]
SuccessAbove = Annotated[
    list[str] | None,
    typer.Option(
        help="Rewards above this are successes (0.8); POLICY=VALUE for one learner. Repeatable.", show_default=False
    ),
]
FailureBelow = Annotated[
    list[str] | None,
    typer.Option(
        help="Rewards below this are failures (0.2); POLICY=VALUE for one learner. Repeatable.", show_default=False
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0, max=2**31 - 1, help="Seed of sampling, draws and intervals (0, or the run's).", show_default=False
    ),
]


@reports_errors
def complementarity(
    run: Run = None,
    rollouts: RolloutFiles = None,
    pool: Pool = None,
    task: Task = None,
    data: Data = None,
    prompts: Prompts = None,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    engine: Engine = None,
    rounds: Rounds = None,
    success: Annotated[
        str, typer.Option(help="A model solves a prompt if its `first` rollout does, or `any` rollout.")
    ] = "first",
    k: Annotated[
        str | None,
        typer.Option("--k", help="Rollouts per model for which to compute SGT's gate: 4,8,16.", show_default=False),
    ] = None,
    success_above: SuccessAbove = None,
    failure_below: FailureBelow = None,
    save: Save = None,
    plot: Plot = None,
    seed: Seed = None,
    model: PoolModels = None,
    source: Sources = None,
    assignments: SourceKeys = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, a
    recommendation; what recorded texts would revive.

    Example: mutualrl complementarity --pool 2qwen --task math --data math_train.jsonl --prompts 500 --samples 5
    """
    from mutualrl.diagnostics.diagnostic_request import DiagnosticFlags, gate_sizes
    from mutualrl.errors import UsageError

    if success not in ("first", "any"):
        raise UsageError(f"--success {success}: expected first or any")
    gate_sizes(k, [1])
    flags = DiagnosticFlags(
        run=run,
        rollouts=tuple(rollouts or ()),
        pool=pool,
        task=task,
        data=data,
        prompts=prompts,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        engine=engine,
        rounds=rounds,
        save=save,
        pool_models=tuple(model or ()),
        sources=tuple(source or ()),
        assignments=tuple(assignments or ()),
        texts=True,
        success_above=tuple(success_above or ()),
        failure_below=tuple(failure_below or ()),
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    _diagnose("complementarity", flags, plot, as_json, success=success, gates=k)


@reports_errors
def xgrpo_check(
    run: Run = None,
    rollouts: RolloutFiles = None,
    pool: Pool = None,
    task: Task = None,
    data: Data = None,
    prompts: Prompts = None,
    samples: Samples = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = None,
    engine: Engine = None,
    rounds: Rounds = None,
    save: Save = None,
    plot: Plot = None,
    seed: Seed = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Do the pooled rewards carry structure? Pooled normalization with the true pool against a shuffled one."""
    from mutualrl.diagnostics.diagnostic_request import DiagnosticFlags

    flags = DiagnosticFlags(
        run=run,
        rollouts=tuple(rollouts or ()),
        pool=pool,
        task=task,
        data=data,
        prompts=prompts,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        engine=engine,
        rounds=rounds,
        save=save,
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    _diagnose("xgrpo-check", flags, plot, as_json)


def _with_models(diagnostic: str, help_text: str) -> Callable[..., None]:
    """Return a command that may load the models that sampled; these commands differ only in name and help."""

    def command(
        run: Run = None,
        rollouts: RolloutFiles = None,
        pool: Pool = None,
        task: Task = None,
        data: Data = None,
        prompts: Prompts = None,
        samples: Samples = None,
        max_new_tokens: MaxNewTokens = None,
        temperature: Temperature = None,
        engine: Engine = None,
        rounds: Rounds = None,
        model: Models = None,
        success_above: SuccessAbove = None,
        failure_below: FailureBelow = None,
        save: Save = None,
        plot: Plot = None,
        seed: Seed = None,
        trust_remote_code: TrustRemoteCode = False,
        as_json: JsonFlag = False,
    ) -> None:
        from mutualrl.diagnostics.diagnostic_request import DiagnosticFlags

        flags = DiagnosticFlags(
            run=run,
            rollouts=tuple(rollouts or ()),
            pool=pool,
            task=task,
            data=data,
            prompts=prompts,
            samples=samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            engine=engine,
            rounds=rounds,
            models=tuple(model or ()),
            save=save,
            success_above=tuple(success_above or ()),
            failure_below=tuple(failure_below or ()),
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        _diagnose(diagnostic, flags, plot, as_json)

    command.__doc__ = help_text
    return reports_errors(command)


sgt_check = _with_models(
    "sgt-check",
    "Where would SGT act, and do the transferred texts belong to the prompt? Gate, success rates, teachers' NLL.",
)
channels = _with_models("channels", "Which of PRP, XGRPO and SGT could each learner use on each prompt?")
cost = _with_models("cost", "What would each regime add to a round, in response tokens?")


def _diagnose(
    diagnostic: str,
    flags: object,
    plot: Path | None,
    as_json: bool,
    *,
    success: str = "first",
    gates: str | None = None,
) -> None:
    from mutualrl.diagnostics.diagnostic_request import DiagnosticFlags, DiagnosticRequest

    assert isinstance(flags, DiagnosticFlags)
    if flags.engine is not None:
        from mutualrl.engines.choice import check_engine

        check_engine(flags.engine)
    request = DiagnosticRequest.of(flags)
    directory = None
    if plot is not None:
        from mutualrl.console.plots import directory_for

        directory = directory_for(plot)
    from mutualrl.diagnostics.diagnose import diagnose
    from mutualrl.diagnostics.diagnostic_tables import MARKDOWN

    result = diagnose(diagnostic, request, prose(), success=success, gates=gates)
    if directory is not None and diagnostic == "complementarity" and "pairs" not in result:
        print_text(prose(), "Note: no figure is drawn: they compare two or more models")
        directory = None
    if directory is not None:
        from mutualrl.console.plots import draw_all
        from mutualrl.diagnostics.figures import FIGURES

        result["figures"] = [str(path) for path in draw_all(FIGURES[diagnostic](result), directory)]
    if as_json:
        emit(result)
    else:
        if diagnostic != "complementarity" or "pairs" in result:
            typer.echo(MARKDOWN[diagnostic](result))
        if "revival" in result:
            from mutualrl.diagnostics.revival import markdown

            typer.echo(markdown(result))
