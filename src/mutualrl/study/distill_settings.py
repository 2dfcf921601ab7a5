"""Settings of the fine-tuning of a learner on its peers' successes. The defaults are the paper's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from mutualrl.errors import RecipeError, UsageError
from mutualrl.recipes.layers import Layers
from mutualrl.recipes.schema import LoraSection
from mutualrl.section import Section
from mutualrl.storage.files import JsonObject, read_checksummed, write_checksummed

REQUEST = "request.json"
_PARTIAL = re.compile(r"\..*\.tmp")  # temporary file of a killed writer

#: keys of TRL's SFTConfig that the command sets itself
OURS = frozenset(
    (
        "output_dir",
        "learning_rate",
        "lr_scheduler_type",
        "num_train_epochs",
        "max_steps",
        "warmup_steps",
        "warmup_ratio",
        "per_device_train_batch_size",
        "seed",
        "report_to",
        "save_strategy",
        "eval_strategy",
        "logging_steps",
        "logging_strategy",
        "disable_tqdm",
        "remove_unused_columns",
        "completion_only_loss",
        "max_length",
        "packing",
        "trust_remote_code",
        "model_init_kwargs",
        "dataset_text_field",
        "push_to_hub",
    )
)


class DistillSettings(Section):
    """Paper, Section "Online Gating versus Sequential Peer Distillation", paragraph "SFT hyperparameters"; the rest
    are TRL's defaults."""

    start: Literal["trained", "base"] = Field("trained", description="the model to fine-tune: after RL, or before")
    teacher: Literal["peer", "own", "gold"] = Field(
        "peer",
        description="source of the texts: the peers' successes; or (baselines) the learner's own, or the data's "
        "solutions",
    )
    success_above: float = Field(0.8, description="a rollout with a reward above this is a success")
    learning_rate: float = Field(2e-5, gt=0)
    lr_scheduler_type: str = "cosine"
    warmup: float = Field(0.03, ge=0, lt=1, description="fraction of the steps")
    epochs: float = Field(1.0, gt=0)
    batch_size: int = Field(8, ge=1, description="examples per step and device (TRL's default)")
    save_every: int = Field(50, ge=0, description="optimizer steps between checkpoints; 0: none")
    limit: int | None = Field(None, ge=1, description="maximum examples per learner, evenly spaced; null: all")
    seed: int = Field(0, ge=0, le=2**31 - 1)
    lora: LoraSection | None = LoraSection(r=16, alpha=32.0, dropout=0.05)
    trainer: dict[str, Any] = Field({}, description="further keys of TRL's SFTConfig")


def parse_settings(start: str, seed: int, assignments: Sequence[str]) -> DistillSettings:
    """Return the settings of a command: `--start`, `--seed`, and `--set KEY=VALUE` for the rest
    (`learning_rate=1e-4`, `lora=null`, `lora.r=8`, `trainer.gradient_accumulation_steps=4`). Raises RecipeError,
    UsageError."""
    tree: JsonObject = {"start": start, "seed": seed}
    layers = Layers(tree)
    for assignment in assignments:
        if (key := assignment.partition("=")[0].strip()) in ("start", "seed"):
            raise UsageError(f"--set {assignment}: use --{key}")
        layers.set(assignment)
    if isinstance(tree.get("lora"), dict):
        tree["lora"] = {"r": 16, "alpha": 32.0, "dropout": 0.05, **tree["lora"]}
    try:
        settings = DistillSettings.model_validate(tree, strict=False)
    except ValidationError as error:
        raise RecipeError(
            [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, found {e['input']!r}" for e in error.errors()]
        ) from None
    if reserved := sorted(OURS & set(settings.trainer)):
        raise RecipeError([f"trainer.{key}: set by distill" for key in reserved])
    return settings


def open_directory(path: Path, request: JsonObject) -> Path:
    """Return `path`, created for a request, or existing for the same request, which is then resumed. Raises UsageError
    if it has another distillation, with the differences, or anything else."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"--out {path} is a file, expected a directory")
    stored = read_checksummed(path / REQUEST, root=path)
    if stored is None and path.is_dir() and any(not _PARTIAL.fullmatch(entry.name) for entry in path.iterdir()):
        raise UsageError(f"--out {path} is not empty; name a new or empty directory")
    if stored is not None:
        differing = sorted(key for key in {*stored, *request} if stored.get(key) != request.get(key))
        if differing:
            raise UsageError(
                f"--out {path} holds another distillation (it differs in {', '.join(differing)}); "
                "name another directory"
            )
        return path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be created: {error.strerror}") from None
    write_checksummed(path / REQUEST, request, root=path)
    return path
