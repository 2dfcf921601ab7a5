"""Diagnostics of a pool: `complementarity`, `xgrpo-check`, `sgt-check`, `channels`, `cost`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.command import command
from mutualrl.cli.output import emit, prose
from mutualrl.console.display import print_text
from mutualrl.console.options import JSON, PLOT, Option
from mutualrl.diagnostics.flags import DiagnosticFlags

SUCCESS_ABOVE = Option("Rewards above this are successes (0.8); POLICY=VALUE for one learner. Repeatable.")
FAILURE_BELOW = Option("Rewards below this are failures (0.2); POLICY=VALUE for one learner. Repeatable.")


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(DiagnosticFlags):
    """Options of a diagnostic of rollouts alone."""

    plot: Annotated[Path | None, PLOT] = None
    as_json: Annotated[bool, JSON] = False


@dataclass(frozen=True, kw_only=True)
class ComplementarityOptions(RolloutOptions):
    """Options of `complementarity`, which also takes recorded texts."""

    texts: bool = True
    success: Annotated[str, Option("A model solves a prompt if its `first` rollout does, or `any` rollout.")] = "first"
    k: Annotated[str | None, Option("Rollouts per model for which to compute SGT's gate: 4,8,16.")] = None
    success_above: Annotated[tuple[str, ...], SUCCESS_ABOVE] = ()
    failure_below: Annotated[tuple[str, ...], FAILURE_BELOW] = ()
    pool_models: Annotated[
        tuple[str, ...], Option("Sample from this model. Repeatable.", "--model", metavar="MODEL")
    ] = ()
    sources: Annotated[
        tuple[str, ...],
        Option(
            "Recorded texts (also a file of --rollouts without rewards). Repeatable.",
            "--source",
            metavar="NAME=recorded:FILE",
        ),
    ] = ()
    assignments: Annotated[
        tuple[str, ...],
        Option("A key of a source, such as sources.NAME.columns.text=COLUMN.", "--set", metavar="KEY=VALUE"),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class WithModelsOptions(RolloutOptions):
    """Options of a diagnostic that may load the models that sampled."""

    models: Annotated[
        tuple[str, ...],
        Option("POLICY=PATH: the model that sampled; by default a run's trained models.", "--model"),
    ] = ()
    success_above: Annotated[tuple[str, ...], SUCCESS_ABOVE] = ()
    failure_below: Annotated[tuple[str, ...], FAILURE_BELOW] = ()


@command(ComplementarityOptions)
def complementarity(options: ComplementarityOptions) -> None:
    """Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, a
    recommendation; what recorded texts would revive.

    Example: mutualrl complementarity --pool 2qwen --task math --data math_train.jsonl --prompts 500 --samples 5
    """
    from mutualrl.diagnostics.diagnostic_request import gate_sizes
    from mutualrl.errors import UsageError

    if options.success not in ("first", "any"):
        raise UsageError(f"--success {options.success}: expected first or any")
    gate_sizes(options.k, [1])
    _diagnose("complementarity", options, success=options.success, gates=options.k)


@command(RolloutOptions)
def xgrpo_check(options: RolloutOptions) -> None:
    """Do the pooled rewards carry structure? Pooled normalization with the true pool against a shuffled one."""
    _diagnose("xgrpo-check", options)


def _with_models(diagnostic: str, help_text: str) -> Callable[..., None]:
    """Return a command that may load the models that sampled; these commands differ only in name and help."""

    def diagnose(options: WithModelsOptions) -> None:
        _diagnose(diagnostic, options)

    diagnose.__doc__ = help_text
    return command(WithModelsOptions)(diagnose)


sgt_check = _with_models(
    "sgt-check",
    "Where would SGT act, and do the transferred texts belong to the prompt? Gate, success rates, teachers' NLL.",
)
channels = _with_models("channels", "Which of PRP, XGRPO and SGT could each learner use on each prompt?")
cost = _with_models("cost", "What would each regime add to a round, in response tokens?")


def _diagnose(diagnostic: str, options: RolloutOptions, *, success: str = "first", gates: str | None = None) -> None:
    from mutualrl.diagnostics.diagnostic_request import DiagnosticRequest

    if options.engine is not None:
        from mutualrl.engines.choice import check_engine

        check_engine(options.engine)
    request = DiagnosticRequest.of(options)
    directory = None
    if options.plot is not None:
        from mutualrl.console.plots import directory_for

        directory = directory_for(options.plot)
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
    if options.as_json:
        emit(result)
    else:
        if diagnostic != "complementarity" or "pairs" in result:
            typer.echo(MARKDOWN[diagnostic](result))
        if "revival" in result:
            from mutualrl.diagnostics.revival import markdown

            typer.echo(markdown(result))
