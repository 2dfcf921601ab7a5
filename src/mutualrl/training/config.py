"""Conversion of a recipe to TRL's GRPOConfig."""

from __future__ import annotations

from pathlib import Path

from trl import GRPOConfig

from mutualrl.errors import MachineError, RecipeError
from mutualrl.recipes.schema import Recipe
from mutualrl.recipes.trainer_table import Settings
from mutualrl.storage.allocation import SHARDINGS, Allocation, Strategy
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
    settings = recipe.trainer_settings(policy)
    keys = {
        **(CPU_DEFAULTS if cpu else {}),
        # The other ranks block in a collective while the main rank waits for the peers: that wait must end first.
        "ddp_timeout": int(recipe.run.round_timeout) + 600,
        **settings,
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
        **strategy_keys(strategy, settings),
        **vllm_keys(settings, allocation.policies_per_gpu, allocation.memory),
    }
    if cpu:
        keys |= on_cpu(strategy)
    keys.pop("generation_batch_size", None)  # implied by steps_per_generation; TRL refuses both together
    if (revision := recipe.policy(policy).revision) is not None:
        keys["model_init_kwargs"] = {**(keys.get("model_init_kwargs") or {}), "revision": revision}
    try:
        return GRPOConfig(**keys)
    except ImportError as error:
        raise MachineError(f"policy {policy!r}: {error}; install it with: pip install 'mutualrl[node]'") from error
    except (ValueError, TypeError) as error:
        raise RecipeError([f"trainer, policy {policy!r}: TRL refuses these settings: {error}"]) from error


def strategy_keys(strategy: Strategy, settings: Settings) -> Settings:
    """Return the keys of a strategy; none for DDP. `settings`: the recipe's keys."""
    sharding = SHARDINGS[strategy]
    if sharding.stage is not None:
        return {"deepspeed": deepspeed_config(sharding.stage)}
    return fsdp2_keys(settings) if sharding.wraps_layers else {}


def on_cpu(strategy: Strategy) -> Settings:
    """Make accelerate start a strategy over gloo on a CPU; return the keys that this takes."""
    from mutualrl.adapter.fsdp2 import allow_fsdp2_on_cpu
    from mutualrl.adapter.trl_compat import allow_zero_on_cpu

    if SHARDINGS[strategy].wraps_layers:
        allow_fsdp2_on_cpu()
    if SHARDINGS[strategy].stage is None:
        return {}
    allow_zero_on_cpu()
    return {"use_cpu": False}  # else accelerate would ignore DeepSpeed


def deepspeed_config(stage: int) -> JsonObject:
    """Return the DeepSpeed configuration of a stage of ZeRO. Batch sizes are taken from the trainer."""
    zero: JsonObject = {"stage": stage}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
    }


def fsdp2_keys(settings: Settings) -> Settings:
    """Return the keys of FSDP2, with the recipe's `fsdp_config`. Each backward reduces its gradients: without, every
    rank keeps whole ones until the step's last micro-batch."""
    config = {**(settings.get("fsdp_config") or {}), "version": 2, "state_dict_type": "FULL_STATE_DICT"}
    accelerator = dict(settings.get("accelerator_config") or {})
    accumulation = {**(accelerator.get("gradient_accumulation_kwargs") or {}), "sync_each_batch": True}
    return {
        "fsdp": True,
        "fsdp_config": config,
        "accelerator_config": {**accelerator, "gradient_accumulation_kwargs": accumulation},
    }
