"""Experiment trackers supported by TRL: trackio, wandb, tensorboard. metrics.jsonl is written in any case."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from mutualrl.adapter.trl_compat import log_value
from mutualrl.recipes.schema import Recipe
from mutualrl.storage.run_info import Validation
from mutualrl.storage.rundir import RunDirectory

if TYPE_CHECKING:
    from trl import GRPOTrainer


def tracker_keys(recipe: Recipe, run: RunDirectory, policy: str) -> dict[str, object]:
    """Return TRL's configuration keys for trackers: one tracked run per policy, named after the run's directory.

    Environment variables that the user has not set are set: the project `mutualrl` and a group for the run (wandb), and
    a directory inside the run (tensorboard).
    """
    if not recipe.run.report_to:
        return {"report_to": "none"}
    os.environ.setdefault("WANDB_PROJECT", "mutualrl")
    os.environ.setdefault("WANDB_RUN_GROUP", run.root.name)
    os.environ.setdefault("WANDB_DIR", str(run.policy(policy).root))
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run.policy(policy).root / "tensorboard"))
    return {"report_to": list(recipe.run.report_to), "run_name": f"{run.root.name}-{policy}", "project": "mutualrl"}


def validation_logger(trainer: GRPOTrainer) -> Callable[[Validation], None]:
    """Return a function that logs a validation with TRL's metrics of the step: `validation/accuracy`, overall and by
    group."""

    def log_validation(validation: Validation) -> None:
        log_value(trainer, "validation/accuracy", validation.accuracy)
        for group, value in validation.by_group.items():
            log_value(trainer, f"validation/accuracy/{group}", value)

    return log_validation
