"""Trial of reward functions on known completions, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mutualrl.records import Completion, Prompt
from mutualrl.tasks.rewarding import rewards_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIAL_PROMPTS = 2
TRIAL_SECONDS = 60.0  # per call


@dataclass(frozen=True, slots=True)
class Trial:
    """Rewards of one kind of completion, in the order of the prompts; NaN: the functions do not score it."""

    completion: str
    rewards: tuple[float, ...]


def try_rewards(
    paths: Sequence[str],
    weights: Sequence[float] | None,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Trial]:
    """Reward the data's solutions, the bare answers, the answers in a box, and empty completions, where the prompts
    have them; each in TRL's form of this tokenizer's completions (messages, or strings).

    Raises RewardError and UsageError as `rewards_of` does; a call is limited to `TRIAL_SECONDS`.
    """
    kinds: dict[str, list[str]] = {}
    solutions = [prompt.solution for prompt in prompts if prompt.solution]
    if len(solutions) == len(prompts):
        kinds["the data's solution"] = solutions
    if all(prompt.answer for prompt in prompts):
        kinds["the answer alone"] = [prompt.answer for prompt in prompts]
        kinds["the answer in \\boxed{}"] = [f"\\boxed{{{prompt.answer}}}" for prompt in prompts]
    kinds["no text"] = ["" for _ in prompts]
    from transformers import TrainerState

    state, trials = TrainerState(), []
    for kind, texts in kinds.items():
        answered = []
        for prompt, text in zip(prompts, texts, strict=True):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            answered.append((prompt, Completion(tuple(ids), text, ended=True)))
        rewards = rewards_of(paths, weights, answered, tokenizer, TRIAL_SECONDS, trainer_state=state)
        trials.append(Trial(kind, tuple(rewards)))
    return trials
