"""Conversion of a task's prompts to the data set of one policy's trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from datasets import Dataset

from mutualrl.errors import DataError
from mutualrl.records import Prompt
from mutualrl.tasks.prompting import as_prompt, prompt_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def within_limit(prompts: Sequence[Prompt], readers: Sequence[tuple[Any, dict[str, Any]]], limit: int) -> list[Prompt]:
    """Return the prompts of at most `limit` tokens under every policy's tokenizer and chat template arguments.

    A prompt too long for any policy is dropped for all, so that every policy sees the identical batch
    (paper, Section "Implementation details").
    """
    fitting = set(range(len(prompts)))
    for tokenizer, template in readers:
        contents = [prompt.content for prompt in prompts]
        for index, ids in enumerate(prompt_ids(contents, tokenizer, template)):
            if len(ids) > limit:
                fitting.discard(index)
    return [prompts[i] for i in sorted(fitting)]


def as_dataset(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return columns `prompt` (text or conversation), `answer`, `prompt_id`, `group`, and the prompts' own columns."""
    others: dict[str, list[object]] = {}
    for key in dict.fromkeys(key for p in prompts for key in p.columns):
        others[key] = [p.columns.get(key) for p in prompts]
        try:
            pa.array(others[key])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"data column {key!r}: rows of different types ({error})") from error
    return Dataset.from_dict(
        {
            **others,
            "prompt": [as_prompt(p.content, tokenizer) for p in prompts],
            "answer": [p.answer for p in prompts],
            "prompt_id": [p.id for p in prompts],
            "group": [p.group for p in prompts],
        }
    )
