"""LoRA configuration for `peft`, and saving of a trained policy, with or without an adapter."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mutualrl.adapter.trl_compat import loaded_from, replaced
from mutualrl.errors import DiskError
from mutualrl.storage.artifacts import commit_directory
from mutualrl.storage.files import free_space, is_disk_failure, remedy

if TYPE_CHECKING:
    from trl import GRPOTrainer


def save_adapter(trainer: GRPOTrainer, state: dict[str, Any], model: Path, adapter: Path) -> None:
    """Save the adapter into `adapter`, and the model with the adapter merged into `model`, on one process.

    The base model is loaded again from its source: under ZeRO-3 no process has all of its weights.
    """
    trained = trainer.accelerator.unwrap_model(trainer.model)
    trained.save_pretrained(adapter, state_dict=state)
    unset_hf_deepspeed_config()  # else the copy would be partitioned and wait for ranks that do not load it
    config = trained.get_base_model().config
    keys = {key: value for key, value in (trainer.args.model_init_kwargs or {}).items() if key == "revision"}
    base = AutoModelForCausalLM.from_pretrained(
        loaded_from(config), dtype=trained.dtype, trust_remote_code=trainer.args.trust_remote_code, **keys
    )
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.generation_config = trainer.declared_generation
    merged.save_pretrained(model)


def save_model(trainer: GRPOTrainer, directory: Path, adapter: Path, identity: Mapping[str, object]) -> None:
    """Save the model for transformers: safetensors, configurations, tokenizer. An adapter is saved merged into the
    model, and separately in `adapter`. Each directory is complete, with a marker that has `identity`, or does not
    exist. Raises DiskError with path and bytes when it cannot be written.

    (`Trainer.save_model` would add its arguments as a pickle; run.json and recipe.yaml have all of them.)
    """
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.accelerator.is_main_process:
        return
    staging, staged_adapter = (path.with_name(f".{path.name}.partial") for path in (directory, adapter))
    for path in (staging, staged_adapter):
        shutil.rmtree(path, ignore_errors=True)
    try:
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            save_adapter(trainer, state, staging, staged_adapter)
            commit_directory(staged_adapter, adapter, identity)
        else:
            with replaced(model, {"generation_config": trainer.declared_generation}):
                model.save_pretrained(staging, state_dict=state)
        trainer.processing_class.save_pretrained(staging)
        commit_directory(staging, directory, identity)
    except Exception as error:
        if not is_disk_failure(error):
            raise
        needed = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        free = free_space(directory.parent)
        for path in (staging, staged_adapter):
            shutil.rmtree(path, ignore_errors=True)
        raise DiskError(
            f"{directory}: the model cannot be written ({error}); it needs {needed:,} bytes, the disk has {free}. "
            f"{remedy(error)} and repeat the command with --resume"
        ) from error
