"""Validation of the keys under `trainer:` (all of TRL's GRPOConfig) without heavy imports."""

from __future__ import annotations

import difflib
import math

from mutualrl.recipes.trainer_table import Settings, fields

#: keys of GRPOConfig that the run sets, and what to use instead.
RESERVED = {
    "output_dir": "use run.dir (--run-dir)",
    "run_name": "use run.dir (--run-dir)",
    "seed": "use run.seed (--seed)",
    "data_seed": "use run.seed (--seed)",
    "max_steps": "use run.steps (--steps)",
    "num_train_epochs": "use run.epochs",
    "logging_steps": "every step is logged to metrics.jsonl",
    "logging_strategy": "every step is logged to metrics.jsonl",
    "logging_first_step": "every step is logged to metrics.jsonl",
    "eval_strategy": "use run.validate_every",
    "eval_steps": "use run.validate_every",
    "do_eval": "use run.validate_every",
    "save_strategy": "use run.save_every",
    "save_steps": "use run.save_every",
    "save_total_limit": "use run.keep_checkpoints",
    "save_only_model": "checkpoints are always complete, for resuming",
    "ignore_data_skip": "a resumed run continues with the same prompts",
    "do_train": "a run always trains",
    "do_predict": "a run always trains",
    "eval_on_start": "every run validates before its first step",
    "load_best_model_at_end": "the last model is kept",
    "resume_from_checkpoint": "use mutualrl train --resume",
    "deepspeed": "use launch.strategy",
    "fsdp": "use launch.strategy (fsdp2)",
    "local_rank": "use launch.processes",
    "disable_tqdm": "the supervisor shows progress",
    "report_to": "use run.report_to (--report-to)",
    "trust_remote_code": "use policies[].trust_remote_code",
    "push_to_hub": "the trained model is saved in the run directory",
    "remove_unused_columns": "reward functions receive all columns",
    "hub_token": "use HF_TOKEN or `hf auth login`: recipes are written to the run's files",
}

#: minimum values of numeric GRPOConfig keys.
MINIMUM: dict[str, float] = {
    "learning_rate": 0,
    "beta": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "delta": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_steps": 0,
    "adam_beta1": 0,
    "adam_beta2": 0,
    "adam_epsilon": 0,
    "top_p": 0,
    "min_p": 0,
    "repetition_penalty": 0,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "max_completion_length": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "vllm_tensor_parallel_size": 1,
    "num_generations": 2,
}
#: values that TRL 1.16 accepts for string keys of GRPOConfig.
CHOICES = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
}
POSITIVE = ("temperature", "vllm_gpu_memory_utilization")


BITS = ("load_in_4bit", "load_in_8bit")  # keys of bitsandbytes' quantization_config


def quantization(settings: Settings) -> Settings:
    """Return the `quantization_config` with which a policy's model is loaded; empty if it is not quantized."""
    loading = settings.get("model_init_kwargs") or {}
    config = loading.get("quantization_config")
    return config if isinstance(config, dict) else {}


#: keys of transformers' fsdp_config that a recipe may have; the run sets the others, or FSDP2 has no use for them
FSDP_KEYS = (
    "activation_checkpointing",
    "auto_wrap_policy",
    "min_num_params",
    "reshard_after_forward",
    "transformer_layer_cls_to_wrap",
)


def sharding_problems(settings: Settings, strategy: str) -> list[tuple[str, str]]:
    """Return the keys under `trainer` that do not go with `launch.strategy`, each with the problem."""
    config, problems = settings.get("fsdp_config"), []
    if config and strategy != "fsdp2":
        problem = f"is used by FSDP2 only, found launch.strategy: {strategy}; expected launch.strategy: fsdp2"
        problems.append(("fsdp_config", problem))
    elif config and (unknown := sorted(set(config) - set(FSDP_KEYS)) if isinstance(config, dict) else [str(config)]):
        problem = f"found {', '.join(unknown)}; expected keys out of {', '.join(FSDP_KEYS)}"
        problems.append(("fsdp_config", problem))
    if strategy == "fsdp2" and "adafactor" in str(settings.get("optim")):
        problem = "found adafactor, which cannot update sharded weights under launch.strategy: fsdp2"
        problems.append(("optim", f"{problem}; expected adamw_torch"))
    return problems


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def validate_trainer_key(key: str, value: object) -> str | None:
    """Return the problem with `trainer.<key>: <value>` and the expected value, or None."""
    table = fields()
    if key in RESERVED:
        return f"is set by the run; {RESERVED[key]}"
    if key not in table:
        near = difflib.get_close_matches(key, table, n=1)
        return "is not a setting of TRL's GRPOConfig" + (f"; did you mean '{near[0]}'?" if near else "")
    allowed = table[key]
    kind = _kind(value)
    valid = "any" in allowed or kind in allowed or (kind == "int" and "float" in allowed)
    if not valid:
        return f"found {value!r} ({kind}), expected {' or '.join(allowed)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"found {value!r}, expected a finite number"
    if key in CHOICES and value not in CHOICES[key]:
        near = difflib.get_close_matches(str(value), CHOICES[key], n=1)
        return f"found {value!r}, expected one of: {', '.join(CHOICES[key])}" + (
            f" (did you mean '{near[0]}'?)" if near else ""
        )
    if key == "model_init_kwargs" and isinstance(value, dict) and "trust_remote_code" in value:
        return "must not contain trust_remote_code; use policies[].trust_remote_code"
    if key == "model_init_kwargs" and isinstance(value, dict) and value.keys() & {"token", "use_auth_token"}:
        return "must not contain a token, which would be written to the run's files; use HF_TOKEN or `hf auth login`"
    if key == "model_init_kwargs" and isinstance(value, dict) and (given := sorted(value.keys() & set(BITS))):
        return f"{given[0]} is no argument of from_pretrained; expected quantization_config: {{{given[0]}: true}}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key in MINIMUM and value < MINIMUM[key]:
            return f"found {value!r}, expected at least {MINIMUM[key]}"
        if key in POSITIVE and value <= 0:
            return f"found {value!r}, expected more than 0"
    return None
