"""Batch plan: prompts per round, and TRL's batching keys derived from it and the devices."""

from __future__ import annotations

from mutualrl.errors import RecipeError
from mutualrl.recipes.schema import Recipe
from mutualrl.recipes.trainer_table import Settings
from mutualrl.storage.allocation import BatchPlan

#: TRL's keys for the size of a round
TRL_BATCHING_KEYS = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
TRL_DEFAULT_BATCH = 8  # per_device_train_batch_size of TRL and transformers


def plan_batch(recipe: Recipe, policy: str, processes: int) -> BatchPlan:
    """Return the batch plan of a policy on `processes` ranks.

    rows of a round = prompts * rollouts = per_device * processes * micro_batches * optimizer_steps.
    Raises RecipeError if this has no integer solution.
    """
    trainer = recipe.trainer_settings(policy)
    rollouts = int(trainer.get("num_generations", 8))
    if recipe.round.prompts is None:
        return _from_trl_keys(trainer, policy, rollouts, processes)
    conflicting = [key for key in TRL_BATCHING_KEYS if key in trainer]
    if conflicting:
        raise RecipeError(
            [
                f"policy {policy!r}: trainer.{conflicting[0]} and round.prompts both set the size of a round; omit "
                f"trainer.{conflicting[0]} (derived from round.prompts, round.optimizer_steps and the devices), or use "
                "only TRL's keys, with round.prompts=null"
            ]
        )
    rows = recipe.round.prompts * rollouts
    per_process = rows // (recipe.round.optimizer_steps * processes)
    per_device = int(trainer.get("per_device_train_batch_size", min(TRL_DEFAULT_BATCH, max(per_process, 1))))
    unit = per_device * processes * recipe.round.optimizer_steps
    if rows % unit:
        raise RecipeError(
            [
                f"policy {policy!r}: {recipe.round.prompts} prompts x {rollouts} rollouts = {rows} completions per "
                f"round do not divide into {recipe.round.optimizer_steps} optimizer steps x {processes} processes x "
                f"{per_device} completions; change round.prompts or trainer.per_device_train_batch_size"
            ]
        )
    return BatchPlan(recipe.round.prompts, rollouts, per_device, rows // unit, recipe.round.optimizer_steps)


def _from_trl_keys(trainer: Settings, policy: str, rollouts: int, processes: int) -> BatchPlan:
    """Return the plan that TRL derives from its own keys (GRPOConfig.__post_init__)."""
    per_device = int(trainer.get("per_device_train_batch_size", TRL_DEFAULT_BATCH))
    micro_batches = int(trainer.get("gradient_accumulation_steps", 1))
    per_generation = trainer.get("steps_per_generation")
    if per_generation is None and "generation_batch_size" in trainer:
        per_generation = trainer["generation_batch_size"] // (per_device * processes)
    slices = micro_batches if per_generation is None else int(per_generation)
    rows = per_device * processes * slices
    if slices % micro_batches or rows % rollouts or rows == 0:
        raise RecipeError(
            [
                f"policy {policy!r}: a round of {slices} micro-batches of {per_device} x {processes} completions must "
                f"contain whole optimizer steps ({micro_batches} micro-batches each) and whole groups of {rollouts}; "
                "change trainer.steps_per_generation, or set round.prompts and omit TRL's batching keys"
            ]
        )
    return BatchPlan(rows // rollouts, rollouts, per_device, micro_batches, slices // micro_batches)
