"""Fine-tuning one learner on texts of its peers, with TRL's SFTTrainer. Importing this imports TRL."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import NoMatchingPeftModuleError
from safetensors import SafetensorError
from transformers import PrinterCallback, set_seed
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from mutualrl.distillation.settings import DistillSettings
from mutualrl.distillation.successes import DistillationExample
from mutualrl.errors import DataError, ModelError, RecipeError
from mutualrl.records import Prompt
from mutualrl.regimes.losses import row_nll
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.thl import retokenize
from mutualrl.training.adapters import lora_config, save_model
from mutualrl.training.config import CPU_DEFAULTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Examples(NamedTuple):
    """Examples of a learner as token ids, and how many successes its tokenizer cannot carry exactly."""

    data: Dataset
    unencodable: int


def examples(
    distillation_examples: Sequence[DistillationExample],
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any],
    limit: int | None,
) -> Examples:
    """Return each example after the learner's own prompt tokens, as SGT packs it (paper, Section "Implementation
    details for Success-Gated Transfer"); the loss is on the text alone. Raises DataError when none is left."""
    taught = list(distillation_examples)
    if limit is not None and len(taught) > limit:
        taught = [taught[i * len(taught) // limit] for i in range(limit)]
    by_text = {prompt.text: prompt for prompt in prompts}
    prompts_taught = sorted({example.prompt for example in taught})
    heads = dict(
        zip(
            prompts_taught,
            prompt_ids([by_text[key].content for key in prompts_taught], tokenizer, template),
            strict=True,
        )
    )
    rows: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
    unencodable = 0
    for example in taught:
        retokenized = retokenize(example.text, tokenizer, ended=True)
        if not retokenized.exact or not retokenized.ids:
            unencodable += 1
            continue
        head = heads[example.prompt]
        rows["input_ids"].append([*head, *retokenized.ids])
        rows["completion_mask"].append([0] * len(head) + [1] * len(retokenized.ids))
    if not rows["input_ids"]:
        raise DataError("the peers have no success that this learner could be taught")
    return Examples(Dataset.from_dict(rows), unencodable)


class PairTrainer(SFTTrainer):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """SFTTrainer with SGT's auxiliary loss: the mean over examples of the per-token mean NLL, where TRL's is the mean
    over all tokens ("The SFT loss matches the SGT auxiliary NLL": paper, the same section)."""

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch; with several batches per step their mean, which `Trainer` leaves to it."""
        labels = inputs["labels"]
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False)
        logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
        logps = -F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        loss = row_nll(logps, labels != -100).mean()
        if num_items_in_batch is not None:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def fine_tune(
    start: str,
    revision: str | None,
    trust_remote_code: bool,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset,
    settings: DistillSettings,
    out: Path,
) -> dict[str, object]:
    """Fine-tune the model `start` on the examples; the result goes to `out`/model (an adapter merged there, and alone
    in `out`/adapter). Returns `steps`, `seconds`, `loss` (means over the first and the last
    tenth of the steps, nats per token)."""
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
        trainer = PairTrainer(
            model=start,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=lora_config(settings.lora),
        )
        trainer.remove_callback(PrinterCallback)
        began = time.monotonic()
        trainer.train()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the model {start!r} cannot be fine-tuned: {error}") from error
    except (TypeError, ValueError, NoMatchingPeftModuleError) as error:  # settings that only the trainer can refuse
        raise RecipeError([f"TRL refuses these settings: {type(error).__name__}: {error}"]) from error
    seconds = time.monotonic() - began
    save_model(trainer, out / "model", out / "adapter")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    part = max(1, len(losses) // 10)
    ends = [statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])]
    return {"steps": trainer.state.global_step, "seconds": seconds, "loss": ends}
