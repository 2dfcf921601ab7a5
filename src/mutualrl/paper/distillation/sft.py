"""Fine-tuning one learner on texts of its peers, with TRL's SFTTrainer. Importing this imports TRL."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import NoMatchingPeftModuleError
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from mutualrl.console.lines import notify
from mutualrl.engines.generation_defaults import neutralize
from mutualrl.errors import CheckpointDamagedError, DataError, DiskError, FileDamagedError, ModelError, RecipeError
from mutualrl.paper.distillation.successes import DistillationExample
from mutualrl.records import Prompt
from mutualrl.regimes.losses import row_nll
from mutualrl.storage.artifacts import file_sum, relative_files, verify_directory
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import JsonObject, is_disk_failure, read_checksummed, remedy, write_checksummed
from mutualrl.study.distill_settings import DistillSettings
from mutualrl.tasks.prompting import Template, prompt_ids
from mutualrl.thl import retokenize
from mutualrl.training.adapters import save_model
from mutualrl.training.config import CPU_DEFAULTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SFT = "sft"  # run id in the markers of its checkpoints
RESULT = "sft.json"


class Examples(NamedTuple):
    """Examples of a learner as token ids, and the number of successes that its tokenizer cannot encode exactly."""

    data: Dataset
    unencodable: int


def examples(
    distillation_examples: Sequence[DistillationExample],
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    limit: int | None,
    end_token_id: int | None = None,
) -> Examples:
    """Return each example after the learner's own prompt tokens, packed as in SGT (paper, Section "Implementation
    details for Success-Gated Transfer"); the loss is on the text and its end token (`thl.end_token`) only. Raises
    DataError if no example remains."""
    selected = list(distillation_examples)
    if limit is not None and len(selected) > limit:
        selected = [selected[i * len(selected) // limit] for i in range(limit)]
    by_text = {prompt.text: prompt for prompt in prompts}
    prompt_texts = sorted({example.prompt for example in selected})
    contents = [by_text[text].content for text in prompt_texts]
    prompt_tokens = dict(zip(prompt_texts, prompt_ids(contents, tokenizer, template), strict=True))
    rows: dict[str, list[list[int]]] = {"input_ids": [], "completion_mask": []}
    unencodable = 0
    for example in selected:
        retokenized = retokenize(example.text, tokenizer, ended=True, end_token_id=end_token_id)
        if not retokenized.exact or not retokenized.ids:
            unencodable += 1
            continue
        ids = prompt_tokens[example.prompt]
        rows["input_ids"].append([*ids, *retokenized.ids])
        rows["completion_mask"].append([0] * len(ids) + [1] * len(retokenized.ids))
    if not rows["input_ids"]:
        raise DataError("no text to train this learner on: no success, or none that it can encode")
    return Examples(Dataset.from_dict(rows), unencodable)


class PairTrainer(SFTTrainer):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """SFTTrainer with SGT's auxiliary loss: the mean over examples of the per-token mean NLL, instead of TRL's mean
    over all tokens ("The SFT loss matches the SGT auxiliary NLL": paper, the same section)."""

    def compute_loss(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch, divided by the batches per step when `Trainer` does not do so itself."""
        labels = inputs["labels"]
        outputs = model(**{key: value for key, value in inputs.items() if key != "labels"}, use_cache=False)
        logits, labels = outputs.logits[:, :-1].float(), labels[:, 1:]
        logps = -F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        loss = row_nll(logps, labels != -100).mean()
        if num_items_in_batch is not None:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class StartModel(NamedTuple):
    """Model that is fine-tuned: its path, how it is loaded, and its tokenizer."""

    path: str
    revision: str | None
    trust_remote_code: bool
    tokenizer: PreTrainedTokenizerBase


def fine_tune(start: StartModel, data: Dataset, settings: DistillSettings, out: Path) -> dict[str, object]:
    """Fine-tune a model on the examples. Writes the model to `out`/model (with an adapter merged; the adapter
    alone to `out`/adapter), and the returned values to `out`/sft.json: `steps`, `seconds` (of all attempts), `loss`
    (means over the first and the last tenth of the steps, nats per token). Resumes from the newest checkpoint in `out`.

    Raises ModelError, RecipeError, CheckpointDamagedError, DiskError.
    """
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
                "save_strategy": "steps" if settings.save_every else "no",
                "save_steps": settings.save_every or 500,
                "report_to": "none",
                "disable_tqdm": True,
                "trust_remote_code": start.trust_remote_code,
                "model_init_kwargs": {"revision": start.revision} if start.revision else None,
            }
        )
    except (TypeError, ValueError) as error:
        raise RecipeError([f"trainer: TRL refuses these settings: {error}"]) from error
    set_seed(settings.seed)
    try:
        trainer = PairTrainer(
            model=start.path,
            args=args,
            train_dataset=data,
            processing_class=start.tokenizer,
            peft_config=None if settings.lora is None else settings.lora.for_peft(),
        )
        trainer.declared_generation = neutralize(trainer.model)
        trainer.remove_callback(PrinterCallback)
        checkpoints = Checkpoints(out)
        checkpoints.clear_partial()
        marker = checkpoints.newest(SFT, out.name, notify)
        earlier = 0.0 if marker is None else float(marker.progress["seconds"])
        started = time.monotonic()
        trainer.add_callback(_CheckpointCallback(checkpoints, out.name, lambda: earlier + time.monotonic() - started))
        trainer.train(resume_from_checkpoint=None if marker is None else str(checkpoints.path(marker.step)))
    except (CheckpointDamagedError, DiskError):
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if is_disk_failure(error):
            raise DiskError(
                f"{out}: cannot be written ({error}). {remedy(error)} and repeat the command, which resumes"
            ) from error
        if isinstance(error, RuntimeError):
            raise
        raise ModelError(f"the model {start.path!r} cannot be fine-tuned: {error}") from error
    except (TypeError, ValueError, NoMatchingPeftModuleError) as error:  # settings that only the trainer can reject
        raise RecipeError([f"TRL refuses these settings: {type(error).__name__}: {error}"]) from error
    seconds = earlier + time.monotonic() - started
    save_model(trainer, out / "model", out / "adapter", {"policy": out.name, "step": trainer.state.global_step})
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tenth = max(1, len(losses) // 10)
    first_and_last = [statistics.fmean(losses[:tenth]), statistics.fmean(losses[-tenth:])]
    result: JsonObject = {"steps": trainer.state.global_step, "seconds": seconds, "loss": first_and_last}
    write_checksummed(out / RESULT, result, root=out.parent)
    shutil.rmtree(checkpoints.root, ignore_errors=True)
    return result


def finished(out: Path) -> JsonObject | None:
    """Return the result of `fine_tune` for a learner that it has finished; None for any other. Raises FileDamagedError
    if the model is not the one that it wrote."""
    result = read_checksummed(out / RESULT, root=out.parent)
    if result is not None and (policy := verify_directory(out / "model").get("policy")) != out.name:
        raise FileDamagedError(f"{out / 'model'}: the model of {policy!r}, expected that of {out.name!r}")
    return result


class _CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """Callback that completes each checkpoint written by transformers, and keeps the newest."""

    def __init__(self, checkpoints: Checkpoints, learner: str, seconds: Callable[[], float]) -> None:
        self._checkpoints = checkpoints
        self._learner = learner
        self._seconds = seconds

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Checksum, mark and rename the files of the step."""
        staged = self._checkpoints.staged(state.global_step)
        (staged / TRAINING_ARGS_NAME).unlink()  # an unused pickle
        marker = CheckpointMarker(
            run_id=SFT,
            policy=self._learner,
            step=state.global_step,
            round=0,
            attempt=0,
            ranks=1,
            files={name: file_sum(staged / name) for name in relative_files(staged)},
            progress={"seconds": self._seconds()},
        )
        self._checkpoints.commit(marker)
        self._checkpoints.prune(1)
