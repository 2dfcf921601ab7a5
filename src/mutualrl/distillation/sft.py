"""Fine-tuning one learner on texts of its peers, with TRL's SFTTrainer. Importing this imports TRL."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from mutualrl.distillation.harvest import Success
from mutualrl.distillation.settings import DistillSettings
from mutualrl.engines.prompts import prompt_ids
from mutualrl.errors import DataError, ModelError, RecipeError
from mutualrl.records import Prompt
from mutualrl.thl import retokenize
from mutualrl.training.adapters import lora_config, save_model
from mutualrl.training.config import CPU_DEFAULTS


class Examples(NamedTuple):
    """The examples of a learner as token ids, and how many successes its tokenizer cannot carry exactly."""

    data: Dataset
    unfit: int


def examples(
    successes: Iterable[Success],
    prompts: Mapping[str, Prompt],
    tokenizer: Any,
    template: Mapping[str, Any],
    limit: int | None,
) -> Examples:
    """Each success after the learner's own prompt tokens, as SGT packs it (paper, Section "Implementation details for
    Success-Gated Transfer"); the loss is on the success alone. Raises DataError when none is left, or a prompt is not
    among the task's."""
    found = list(successes)
    if limit is not None and len(found) > limit:
        found = [found[i * len(found) // limit] for i in range(limit)]
    absent = sorted({success.prompt_id for success in found} - set(prompts))
    if absent:
        raise DataError(
            f"{len(absent)} prompts of the harvest are not in the run's training data any more, such as {absent[0]!r}; "
            "give the data that the run was trained on"
        )
    asked = sorted({success.prompt_id for success in found})
    heads = dict(zip(asked, prompt_ids([prompts[key].content for key in asked], tokenizer, template), strict=True))
    rows: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
    unfit = 0
    for success in found:
        carried = retokenize(success.text, tokenizer, ended=True)
        if not carried.exact or not carried.ids:
            unfit += 1
            continue
        head = heads[success.prompt_id]
        rows["input_ids"].append([*head, *carried.ids])
        rows["completion_mask"].append([0] * len(head) + [1] * len(carried.ids))
    if not rows["input_ids"]:
        raise DataError("the peers have no success that this learner could be taught")
    return Examples(Dataset.from_dict(rows), unfit)


def fine_tune(
    start: str, revision: str | None, trust_remote_code: bool, tokenizer: Any, data: Dataset,
    settings: DistillSettings, out: Path,
) -> dict[str, Any]:  # fmt: skip
    """Fine-tune the model `start` on the examples; the result goes to `out`/model (an adapter merged there, and alone
    in `out`/adapter). Returns `steps`, `seconds`, `loss` (the first and the last logged, nats a token)."""
    logging.disable_progress_bar()
    cpu = not torch.cuda.is_available()
    try:
        args = SFTConfig(
            **{
                **(CPU_DEFAULTS if cpu else {}),
                **settings.trainer,
                "output_dir": str(out / "trainer"),
                "learning_rate": settings.learning_rate,
                "lr_scheduler_type": settings.lr_scheduler_type,
                "warmup_steps": settings.warmup,
                "num_train_epochs": settings.epochs,
                "per_device_train_batch_size": settings.batch_size,
                "seed": settings.seed,
                "completion_only_loss": True,
                "max_length": None,
                "logging_steps": 1,
                "logging_strategy": "steps",
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "trust_remote_code": trust_remote_code,
                "model_init_kwargs": {"revision": revision} if revision else None,
            }
        )
    except (TypeError, ValueError) as error:
        raise RecipeError([f"trainer: TRL refuses these settings: {error}"]) from error
    set_seed(settings.seed)
    try:
        trainer = SFTTrainer(
            model=start, args=args, train_dataset=data, processing_class=tokenizer,
            peft_config=lora_config(settings.lora),
        )  # fmt: skip
    except OSError as error:
        raise ModelError(f"the model {start!r} cannot be loaded: {error}") from error
    trainer.remove_callback(PrinterCallback)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    save_model(trainer, out / "model", out / "adapter")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": trainer.state.global_step, "seconds": seconds, "loss": [losses[0], losses[-1]]}
