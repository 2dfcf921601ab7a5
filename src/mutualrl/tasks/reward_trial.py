"""Trial of reward functions on known completions, before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mutualrl.process.loading import fast_imports
from mutualrl.records import Completion, Prompt
from mutualrl.tasks.rewarding import rewards_of
from mutualrl.trajectory import Trajectory

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
    with fast_imports():
        from transformers import TrainerState

    state, trials = TrainerState(), []
    for kind, texts in kinds.items():
        answered = []
        for prompt, text in zip(prompts, texts, strict=True):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            answered.append((prompt, Completion(tuple(ids), Trajectory.of_text(text), ended=True)))
        rewards = rewards_of(paths, weights, answered, tokenizer, TRIAL_SECONDS, trainer_state=state)
        trials.append(Trial(kind, tuple(rewards)))
    return trials


def varied_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompts, and the first whose answer is of another kind: another type, or of several lines."""
    chosen, kinds = list(prompts[:TRIAL_PROMPTS]), {_kind(prompt) for prompt in prompts[:TRIAL_PROMPTS]}
    for prompt in prompts[TRIAL_PROMPTS:]:
        if (kind := _kind(prompt)) not in kinds:
            kinds.add(kind)
            chosen.append(prompt)
    return chosen


def _kind(prompt: Prompt) -> tuple[type, bool]:
    value = prompt.columns.get("answer", prompt.answer)
    return type(value), isinstance(value, str) and "\n" in value.strip()


def flat_note(trials: Sequence[Trial]) -> list[str]:
    """Return a note if the rewards do not tell right answers from none: a policy would learn nothing from them."""
    rewards = [reward for trial in trials for reward in trial.rewards]
    if not rewards or (len({trial.completion for trial in trials}) < 2):
        return []
    if all(map(math.isnan, rewards)):
        return [
            "the reward functions score none of the completions that were tried: there would be nothing to learn from"
        ]
    if len(set(rewards)) == 1:
        return [f"the reward is {rewards[0]:g} for every completion that was tried, right answers and no text alike"]
    return []
