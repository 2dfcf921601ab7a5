"""Generation outside training, behind one Protocol: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to decode. `temperature` 0 is greedy; `seed` fixes the sampling noise."""

    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated response: the sampled ids, their text, and whether it ended by itself."""

    token_ids: tuple[int, ...]
    text: str
    ended: bool


class Engine(Protocol):
    """Something that answers prompts. `prompts` are texts as the task gives them."""

    name: str

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.samples` completions of every prompt, in the prompts' order."""
        ...
