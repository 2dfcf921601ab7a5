"""Rewards of completions outside training, by the functions that a recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutualrl.engines.base import Completion
from mutualrl.engines.prompts import as_prompt
from mutualrl.records import Prompt
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tasks.rewards import load_rewards, named, weighted

BOXED = ("boxed",)


def rewards_of(
    paths: Sequence[str], weights: Sequence[float] | None, answered: Sequence[tuple[Prompt, Completion]], tokenizer: Any
) -> list[float]:
    """The reward of each completion: exact match of the boxed answer, or the weighted sum of reward functions, each
    called once with all of them, as TRL calls it.

    Raises RewardError with the function's name, UsageError when one cannot be imported.
    """
    if tuple(paths) == BOXED:
        return [boxed_score(completion.text, prompt.answer) for prompt, completion in answered]
    functions = [named(function, path) for function, path in zip(load_rewards(paths), paths, strict=True)]
    asked = [as_prompt(prompt.content, tokenizer) for prompt, _ in answered]
    keys = dict.fromkeys(key for prompt, _ in answered for key in prompt.columns)
    given = {
        **{key: [prompt.columns.get(key) for prompt, _ in answered] for key in keys},
        "answer": [prompt.answer for prompt, _ in answered],
        "prompt_id": [prompt.id for prompt, _ in answered],
        "group": [prompt.group for prompt, _ in answered],
        "prompts": asked,
        "completions": [
            completion.text if isinstance(prompt, str) else [{"role": "assistant", "content": completion.text}]
            for prompt, (_, completion) in zip(asked, answered, strict=True)
        ],
        "completion_ids": [list(completion.token_ids) for _, completion in answered],
        "trainer_state": None,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    return weighted(functions, paths, weights or [1.0] * len(functions), given, len(answered))
