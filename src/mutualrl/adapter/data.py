"""Conversion of a task's prompts to the data set of one policy's trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from mutualrl.records import Prompt, columns_of
from mutualrl.tasks.prompting import as_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_dataset(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return rows with `prompt` (text or conversation), `prompt_id`, and all that a reward function receives.

    The columns for the reward function are added when a row is read: Arrow, which would change or refuse integers over
    64 bits and columns of several types, never has them.
    """
    by_id = {prompt.id: prompt for prompt in prompts}

    def complete(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**batch, **columns_of(by_id[prompt_id] for prompt_id in batch["prompt_id"])}

    data = Dataset.from_dict(
        {"prompt": [as_prompt(p.content, tokenizer) for p in prompts], "prompt_id": [p.id for p in prompts]}
    )
    return data.with_transform(complete)
