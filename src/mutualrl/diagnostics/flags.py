"""Options that the diagnostics share: where rollouts come from, and how to sample them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import ENGINE, SEED_LIMIT, TRUST_REMOTE_CODE, Option

SUCCESS_ABOVE = Option("Rewards above this are successes (0.8); POLICY=VALUE for one learner. Repeatable.")
FAILURE_BELOW = Option("Rewards below this are failures (0.2); POLICY=VALUE for one learner. Repeatable.")


@dataclass(frozen=True, kw_only=True)
class DiagnosticFlags:
    """Options of a diagnostic; None or empty: not given. Those without an `Option` are some diagnostics' only:
    `models` (POLICY=PATH of the model that sampled), `pool_models` (models to sample from), `sources` and `assignments`
    (recorded texts and their keys), thresholds. `texts`: the diagnostic takes recorded texts, too."""

    run: Annotated[Path | None, Option("Use the rollouts of a run's exchange.")] = None
    rollouts: Annotated[
        tuple[Path, ...],
        Option("JSON Lines or Parquet: prompt_id, reward, policy (without it, one file per model). Repeatable."),
    ] = ()
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
    models: tuple[str, ...] = ()
    pool_models: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    assignments: tuple[str, ...] = ()
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
