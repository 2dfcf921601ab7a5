"""Checks of the keys under `trainer:` (everything in TRL's GRPOConfig), before any heavy import."""

from __future__ import annotations

import difflib
import math
from typing import Any

from mutualrl.recipes.trainer_table import fields

#: keys of GRPOConfig that the run itself decides, and where to say it instead.
RESERVED = {
    "output_dir": "run.dir (--run-dir)",
    "run_name": "run.dir (--run-dir)",
    "seed": "run.seed (--seed)",
    "data_seed": "run.seed (--seed)",
    "max_steps": "run.steps (--steps)",
    "num_train_epochs": "run.epochs",
    "logging_steps": "nothing: every step is logged to metrics.jsonl",
    "logging_strategy": "nothing: every step is logged to metrics.jsonl",
    "logging_first_step": "nothing: every step is logged to metrics.jsonl",
    "eval_strategy": "run.validate_every",
    "eval_steps": "run.validate_every",
    "do_eval": "run.validate_every",
    "save_strategy": "run.save_every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep_checkpoints",
    "save_only_model": "nothing: a checkpoint is complete, or a run could not resume from it",
    "ignore_data_skip": "nothing: a resumed run sees the prompts that it would have seen",
    "do_train": "nothing: the run trains",
    "do_predict": "nothing: the run trains",
    "eval_on_start": "nothing: every run validates before its first step",
    "load_best_model_at_end": "nothing: the last model is kept",
    "resume_from_checkpoint": "mutualrl train --resume",
    "deepspeed": "launch.strategy",
    "local_rank": "launch.processes",
    "disable_tqdm": "nothing: the supervisor shows the progress",
    "report_to": "run.report_to (--report-to)",
    "trust_remote_code": "policies[].trust_remote_code",
    "push_to_hub": "nothing: the trained model is saved in the run directory",
    "remove_unused_columns": "nothing: the run sets it",
    "hub_token": "HF_TOKEN or `hf auth login`: what a recipe says is written into the run's files",
}

#: numbers of GRPOConfig for which a value below this has no meaning.
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
#: texts of GRPOConfig of which only these mean something to TRL 1.16.
CHOICES = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
}
POSITIVE = ("temperature", "vllm_gpu_memory_utilization")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def problem_with(key: str, value: Any) -> str | None:
    """Return what is wrong with `trainer.<key>: <value>`, with what was expected; None when nothing is."""
    table = fields()
    if key in RESERVED:
        return f"is decided by the run; use {RESERVED[key]}"
    if key not in table:
        near = difflib.get_close_matches(key, table, n=1)
        return "is not a setting of TRL's GRPOConfig" + (f"; did you mean '{near[0]}'?" if near else "")
    allowed = table[key]
    kind = _kind(value)
    fits = "any" in allowed or kind in allowed or (kind == "int" and "float" in allowed)
    if not fits:
        return f"found {value!r} ({kind}), expected {' or '.join(allowed)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"found {value!r}, expected a finite number"
    if key in CHOICES and value not in CHOICES[key]:
        near = difflib.get_close_matches(str(value), CHOICES[key], n=1)
        return f"found {value!r}, expected one of: {', '.join(CHOICES[key])}" + (
            f" (did you mean '{near[0]}'?)" if near else ""
        )
    if key == "model_init_kwargs" and isinstance(value, dict) and "trust_remote_code" in value:
        return "must not hold trust_remote_code; use policies[].trust_remote_code"
    if key == "model_init_kwargs" and isinstance(value, dict) and value.keys() & {"token", "use_auth_token"}:
        return "must not hold a token, which would be written into the run's files; use HF_TOKEN or `hf auth login`"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key in MINIMUM and value < MINIMUM[key]:
            return f"found {value!r}, expected at least {MINIMUM[key]}"
        if key in POSITIVE and value <= 0:
            return f"found {value!r}, expected more than 0"
    return None
