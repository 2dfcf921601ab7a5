"""Rewards of completions outside a training step, from a recipe's reward functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mutualrl.console.lines import notify
from mutualrl.process.limits import REWARD_SECONDS
from mutualrl.records import Completion, Prompt, columns_of
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tasks.prompting import as_prompt
from mutualrl.tasks.rewards import load_rewards, weighted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOXED = ("boxed",)


def rewards_of(
    paths: Sequence[str],
    weights: Sequence[float] | None,
    answered: Sequence[tuple[Prompt, Completion]],
    tokenizer: PreTrainedTokenizerBase | None,
    timeout: float = REWARD_SECONDS,
    trainer_state: object = None,
) -> list[float]:
    """Return the reward of each completion: exact match of the boxed answer, or the weighted sum of reward functions,
    NaN where it cannot be scored.

    Each function is called once with all completions, as in TRL, and is limited to `timeout` seconds. Raises
    RewardError with the function's name, UsageError when one cannot be imported.
    """
    if tuple(paths) == BOXED:
        return [boxed_score(completion.text, prompt.answer) for prompt, completion in answered]
    functions = load_rewards(paths)
    arguments = reward_arguments(answered, tokenizer, trainer_state)
    rewards = weighted(functions, paths, weights or [1.0] * len(functions), arguments, timeout)
    if all(map(math.isnan, rewards)):
        notify(f"no reward from {', '.join(paths)} for any of {len(rewards)} completions: they are unscorable")
    return rewards


def reward_arguments(
    answered: Sequence[tuple[Prompt, Completion]],
    tokenizer: PreTrainedTokenizerBase | None,
    trainer_state: object = None,
) -> dict[str, object]:
    """Build the keyword arguments that TRL passes to a reward function for these completions."""
    prompts = [as_prompt(prompt.content, tokenizer) for prompt, _ in answered]
    completions: list[str | list[dict[str, object]]] = []
    for source, (_, completion) in zip(prompts, answered, strict=True):
        as_text = completion.trajectory.is_text and isinstance(source, str)
        completions.append(completion.text if as_text else completion.trajectory.chats)
    return {
        **columns_of([prompt for prompt, _ in answered]),
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(completion.token_ids) for _, completion in answered],
        "trainer_state": trainer_state,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
