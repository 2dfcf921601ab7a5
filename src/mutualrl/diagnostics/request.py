"""Requests of the diagnostics, which are their options: where rollouts come from, how to sample them, thresholds.

Those of the modules in `specs` are here, so that their help need not import them. A diagnostic can also declare its
own beside itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from mutualrl.console.options import SEED_LIMIT, TRUST_REMOTE_CODE, Option, OptionGroup, WithPlot
from mutualrl.engines.sampling import SamplingOptions
from mutualrl.errors import UsageError
from mutualrl.recipes.request import Request


@dataclass(frozen=True, kw_only=True)
class ThresholdOptions:
    """When a reward is a success and when a failure; empty: a run's, else the paper's."""

    success_above: Annotated[
        tuple[str, ...],
        Option("Rewards above this are successes (0.8); POLICY=VALUE for one learner. Repeatable."),
    ] = ()
    failure_below: Annotated[
        tuple[str, ...],
        Option("Rewards below this are failures (0.2); POLICY=VALUE for one learner. Repeatable."),
    ] = ()


#: what a diagnostic asks of a recipe: pool, task, rows, seed, and keys of task and sources
ASKED = {
    "pool": Option("Sample from the models of a pool (tiny)."),
    "task": Option("Task of the prompts (the pool's)."),
    "data": Option("The task's rows: a file, a directory, or hub:OWNER/NAME."),
    "seed": Option("Seed of sampling, draws and intervals (0, or the run's).", min=0, max=SEED_LIMIT),
    "assignments": Option(
        "A key of the task or of a source: task.template={question}, task.reward=my.py:reward, "
        "sources.NAME.columns.text=COLUMN. Repeatable.",
        "--set",
        metavar="KEY=VALUE",
    ),
}


@dataclass(frozen=True, kw_only=True)
class DiagnosticRequest(WithPlot):
    """Request of a diagnostic; None or empty: not given. Fields without an `Option` are some diagnostics' only:
    `models` (POLICY=PATH of the model that sampled), `thresholds`, `hints`."""

    #: whether the diagnostic takes recorded texts, too
    texts: ClassVar[bool] = False

    run: Annotated[Path | None, Option("Use the rollouts of a run's exchange.")] = None
    rollouts: Annotated[
        tuple[Path, ...],
        Option(
            "JSON Lines, CSV or Parquet: prompt_id, reward, policy (without it, one file per model); dumps of TRL and "
            "verifiers. Repeatable."
        ),
    ] = ()
    reward: Annotated[str | None, Option("Column of --rollouts with the reward (reward; in TRL's, its only one).")] = (
        None
    )
    asked: Annotated[Request, OptionGroup(*ASKED, **ASKED)] = Request()
    prompts: Annotated[int | None, Option("Maximum number of prompts (256).", min=1)] = None
    sampling: Annotated[
        SamplingOptions,
        OptionGroup(
            *("samples", "max_new_tokens", "temperature", "engine"),
            samples=Option("Rollouts per prompt (the pool's group size).", min=1, max=1024),
            max_new_tokens=Option("Maximum response length in tokens (the pool's).", min=1),
            temperature=Option("Sampling temperature (1).", min=0.0, max=10.0),
        ),
    ] = SamplingOptions()
    rounds: Annotated[str | None, Option("Rounds of a run, FIRST:LAST inclusive (all).")] = None
    save: Annotated[Path | None, Option("Save the sampled rollouts (.parquet), for --rollouts.")] = None
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
    models: tuple[str, ...] = ()
    thresholds: ThresholdOptions = ThresholdOptions()
    hints: bool = False


@dataclass(frozen=True, kw_only=True)
class LearnerRequest(DiagnosticRequest):
    """Request of a diagnostic of each learner, which may load the models that sampled."""

    models: Annotated[
        tuple[str, ...],
        Option("POLICY=PATH: the model that sampled; by default a run's trained models.", "--model"),
    ] = ()
    thresholds: Annotated[ThresholdOptions, OptionGroup()] = ThresholdOptions()


@dataclass(frozen=True, kw_only=True)
class ComplementarityRequest(DiagnosticRequest):
    """Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, advice.

    Example: mutualrl complementarity --pool 2qwen --task math --data math_train.jsonl --prompts 500 --samples 5
    """

    texts: ClassVar[bool] = True

    asked: Annotated[
        Request,
        OptionGroup(
            *ASKED,
            *("models", "sources"),
            **ASKED,
            models=Option("Sample from this model. Repeatable.", "--model", metavar="MODEL"),
            sources=Option(
                "Recorded texts (also a file of --rollouts without rewards). Repeatable.",
                "--source",
                metavar="NAME=recorded:FILE",
            ),
        ),
    ] = Request()
    hints: Annotated[
        bool,
        Option("Also sample where the gate opens, with a peer's success as a hint and without: is `hinted` better?"),
    ] = False
    success: Annotated[str, Option("A model solves a prompt if its `first` rollout does, or `any` rollout.")] = "first"
    k: Annotated[str | None, Option("Rollouts per model for which to compute SGT's gate: 4,8,16.")] = None
    thresholds: Annotated[ThresholdOptions, OptionGroup()] = ThresholdOptions()

    def __post_init__(self) -> None:
        """Check what only this diagnostic has. Raises UsageError."""
        if self.success not in ("first", "any"):
            raise UsageError(f"--success {self.success}: expected first or any")
        gate_sizes(self.k, [1])


def gate_sizes(text: str | None, samples: Sequence[int]) -> list[int]:
    """Return the values of K for the gate rates: `--k 1,4,8`, or powers of two up to the number of rollouts.

    Raises UsageError.
    """
    if text is None:
        most = min(samples)
        return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,3}", part) for part in parts):
        raise UsageError(f"--k {text}: expected numbers of rollouts separated by commas, such as 4,8,16")
    return sorted({int(part) for part in parts})


#: requests of the diagnostics of this package, by command
REQUESTS: Mapping[str, type[DiagnosticRequest]] = {
    "complementarity": ComplementarityRequest,
    "sgt-check": LearnerRequest,
}
