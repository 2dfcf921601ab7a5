"""Batching of token ids in TRL's layout: prompts left-padded, completions right-padded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from trl.trainer.utils import pad

from mutualrl.records import Ids


def as_tensor(ids: Sequence[int] | Ids) -> torch.Tensor:
    """Return token ids as a tensor, shape (T,)."""
    return torch.as_tensor(np.asarray(ids, dtype=np.int64))


def padded(rows: Sequence[torch.Tensor], value: float, side: str, device: torch.device) -> torch.Tensor:
    """Return the rows as one tensor, shape (rows, longest), padded with `value` on `side`."""
    filled: torch.Tensor = pad(list(rows), padding_value=value, padding_side=side)
    return filled.to(device)


def as_batch(
    prompts: Sequence[torch.Tensor], completions: Sequence[torch.Tensor], pad_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return `prompt_ids`, `prompt_mask`, `completion_ids` and `completion_mask` of the rows."""
    return {
        "prompt_ids": padded(prompts, pad_id, "left", device),
        "prompt_mask": padded([torch.ones_like(p) for p in prompts], 0, "left", device),
        "completion_ids": padded(completions, pad_id, "right", device),
        "completion_mask": padded([torch.ones_like(c) for c in completions], 0, "right", device),
    }


def concatenated(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return ids and attention mask of prompt and completion, concatenated, and the number of completion positions."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)
