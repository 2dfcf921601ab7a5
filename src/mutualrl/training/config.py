"""Conversion of a recipe to TRL's GRPOConfig."""

from __future__ import annotations

from pathlib import Path

from trl import GRPOConfig

from mutualrl.errors import MachineError, RecipeError
from mutualrl.recipes.schema import Recipe
from mutualrl.recipes.trainer_table import Settings
from mutualrl.storage.allocation import Allocation
from mutualrl.storage.files import JsonObject
from mutualrl.training.vllm_generation import vllm_keys

# TRL's defaults are for GPUs. On CPU, bf16 is slower for small models, or without hardware support
# (docs/results.md), and gradient checkpointing saves memory that is not scarce.
CPU_DEFAULTS: Settings = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}


def grpo_config(
    recipe: Recipe, allocation: Allocation, output: Path, *, cpu: bool, trackers: Settings | None = None
) -> GRPOConfig:
    """Return the configuration of a policy's trainer, in ascending precedence: TRL's defaults, ours for the device,
    recipe, run.

    Raises RecipeError when TRL refuses the combination, MachineError when a package is missing.
    """
    policy, strategy = allocation.policy, allocation.strategy
    keys = {
        **(CPU_DEFAULTS if cpu else {}),
        # The other ranks block in a collective while the main rank waits for the peers: that wait must end first.
        "ddp_timeout": int(recipe.run.round_timeout) + 600,
        **recipe.trainer_settings(policy),
        **allocation.batch.trainer_keys(),
        "output_dir": str(output),
        "seed": recipe.run.seed,
        "max_steps": recipe.run.steps,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": recipe.run.save_every or recipe.run.steps,
        "eval_strategy": "no",
        **(trackers or {"report_to": "none"}),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "trust_remote_code": recipe.policy(policy).trust_remote_code,
        **deepspeed_config(strategy),
        **vllm_keys(recipe.trainer_settings(policy), allocation.policies_per_gpu, allocation.memory),
    }
    if cpu and strategy != "ddp":
        keys["use_cpu"] = False  # else accelerate would ignore DeepSpeed
        from mutualrl.adapter.trl_compat import allow_zero_on_cpu

        allow_zero_on_cpu()
    keys.pop("generation_batch_size", None)  # implied by steps_per_generation; TRL refuses both together
    if (revision := recipe.policy(policy).revision) is not None:
        keys["model_init_kwargs"] = {**(keys.get("model_init_kwargs") or {}), "revision": revision}
    try:
        return GRPOConfig(**keys)
    except ImportError as error:
        raise MachineError(f"policy {policy!r}: {error}; install it with: pip install 'mutualrl[node]'") from error
    except (ValueError, TypeError) as error:
        raise RecipeError([f"trainer, policy {policy!r}: TRL refuses these settings: {error}"]) from error


def deepspeed_config(strategy: str) -> dict[str, object]:
    """Return the DeepSpeed configuration of a strategy; empty for DDP. Batch sizes are taken from the trainer."""
    if strategy == "ddp":
        return {}
    stage: JsonObject = {"stage": 3 if strategy == "zero3" else 2}
    if strategy == "zero3":
        stage["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "deepspeed": {
            "zero_optimization": stage,
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "train_batch_size": "auto",
        }
    }
