"""Accuracy of completions, in all and by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mutualrl.records import Prompt
from mutualrl.tasks.boxed import boxed_score, last_boxed


@dataclass(frozen=True, slots=True)
class Score:
    """Exact-match accuracy over `n` prompts; `no_box` is the share of completions without a boxed answer, None where
    nobody looked for one."""

    n: int
    accuracy: float
    by_group: dict[str, float]
    no_box: float | None

    def to_json(self) -> dict[str, Any]:
        """The score as plain values."""
        return asdict(self)


def score(prompts: Sequence[Prompt], completions: Sequence[str]) -> Score:
    """Score one completion a prompt. Raises ValueError when there are none, or the numbers differ."""
    if not prompts or len(prompts) != len(completions):
        raise ValueError(f"{len(completions)} completions for {len(prompts)} prompts; expected one each")
    hits = [boxed_score(text, prompt.answer) for prompt, text in zip(prompts, completions, strict=True)]
    return _averaged(prompts, hits, sum(last_boxed(text) is None for text in completions) / len(completions))


def score_rewards(prompts: Sequence[Prompt], rewards: Sequence[float]) -> Score:
    """The mean reward in place of accuracy, for tasks with reward functions of their own; nobody looks for a box then.

    Raises ValueError when there are none, or the numbers differ.
    """
    if not prompts or len(prompts) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards for {len(prompts)} prompts; expected one each")
    return _averaged(prompts, list(rewards), None)


def _averaged(prompts: Sequence[Prompt], hits: list[float], no_box: float | None) -> Score:
    groups: dict[str, list[float]] = {}
    for prompt, hit in zip(prompts, hits, strict=True):
        groups.setdefault(prompt.group, []).append(hit)
    return Score(
        n=len(hits),
        accuracy=sum(hits) / len(hits),
        by_group={name: sum(group) / len(group) for name, group in sorted(groups.items())},
        no_box=no_box,
    )
