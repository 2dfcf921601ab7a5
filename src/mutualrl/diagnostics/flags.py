"""Options of the diagnostics: where rollouts come from, how to sample them, and what single ones add.

The options of the diagnostic in `specs/NAME.py` are here under its name, as `NameFlags`, so that its help need not
import it. A diagnostic can also declare them itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import ENGINE, SEED_LIMIT, TRUST_REMOTE_CODE, Option, WithPlot
from mutualrl.errors import UsageError

SUCCESS_ABOVE = Option("Rewards above this are successes (0.8); POLICY=VALUE for one learner. Repeatable.")
FAILURE_BELOW = Option("Rewards below this are failures (0.2); POLICY=VALUE for one learner. Repeatable.")


@dataclass(frozen=True, kw_only=True)
class DiagnosticFlags:
    """Options of a diagnostic; None or empty: not given. Those without an `Option` are some diagnostics' only:
    `models` (POLICY=PATH of the model that sampled), `pool_models` (models to sample from), `sources`
    (recorded texts), thresholds. `texts`: the diagnostic takes recorded texts, too."""

    run: Annotated[Path | None, Option("Use the rollouts of a run's exchange.")] = None
    rollouts: Annotated[
        tuple[Path, ...],
        Option(
            "JSON Lines or Parquet: prompt_id, reward, policy (without it, one file per model); dumps of TRL and "
            "verifiers. Repeatable."
        ),
    ] = ()
    reward: Annotated[str | None, Option("Column of --rollouts with the reward (reward; in TRL's, its only one).")] = (
        None
    )
    pool: Annotated[str | None, Option("Sample from the models of a pool (tiny).")] = None
    task: Annotated[str | None, Option("Task of the prompts (the pool's).")] = None
    data: Annotated[Path | None, Option("The task's rows: a file, a directory, or hub:OWNER/NAME.")] = None
    prompts: Annotated[int | None, Option("Maximum number of prompts (256).", min=1)] = None
    samples: Annotated[int | None, Option("Rollouts per prompt (the pool's group size).", min=1, max=1024)] = None
    max_new_tokens: Annotated[int | None, Option("Maximum response length in tokens (the pool's).", min=1)] = None
    temperature: Annotated[float | None, Option("Sampling temperature (1).", min=0.0, max=10.0)] = None
    engine: Annotated[str | None, ENGINE] = None
    rounds: Annotated[str | None, Option("Rounds of a run, FIRST:LAST inclusive (all).")] = None
    save: Annotated[Path | None, Option("Save the sampled rollouts (.parquet), for --rollouts.")] = None
    seed: Annotated[
        int | None, Option("Seed of sampling, draws and intervals (0, or the run's).", min=0, max=SEED_LIMIT)
    ] = None
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
    assignments: Annotated[
        tuple[str, ...],
        Option(
            "A key of the task or of a source: task.template={question}, task.reward=my.py:reward, "
            "sources.NAME.columns.text=COLUMN. Repeatable.",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = ()
    models: tuple[str, ...] = ()
    pool_models: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    texts: bool = False
    hints: bool = False
    success_above: tuple[str, ...] = ()
    failure_below: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LearnerFlags(DiagnosticFlags):
    """Options of a diagnostic of each learner, which may load the models that sampled."""

    models: Annotated[
        tuple[str, ...],
        Option("POLICY=PATH: the model that sampled; by default a run's trained models.", "--model"),
    ] = ()
    success_above: Annotated[tuple[str, ...], SUCCESS_ABOVE] = ()
    failure_below: Annotated[tuple[str, ...], FAILURE_BELOW] = ()


@dataclass(frozen=True, kw_only=True)
class ComplementarityFlags(DiagnosticFlags, WithPlot):
    """Will these models, or these texts, help each other? Overlap of solved prompts, rescues, SGT's gate rate, advice.

    Example: mutualrl complementarity --pool 2qwen --task math --data math_train.jsonl --prompts 500 --samples 5
    """

    texts: bool = True
    hints: Annotated[
        bool,
        Option("Also sample where the gate opens, with a peer's success as a hint and without: is `hinted` better?"),
    ] = False
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

    def __post_init__(self) -> None:
        """Check what only this diagnostic has. Raises UsageError."""
        if self.success not in ("first", "any"):
            raise UsageError(f"--success {self.success}: expected first or any")
        gate_sizes(self.k, [1])


@dataclass(frozen=True, kw_only=True)
class SgtCheckFlags(LearnerFlags, WithPlot):
    """Where would SGT act, and do the transferred texts belong to the prompt? Gate, success rates, teachers' NLL."""


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
