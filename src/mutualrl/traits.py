"""What sources say of themselves, for those that fit them together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceTraits:
    """What a source has besides texts and rewards. `every_prompt`: samples on every prompt of a round, drawn whatever
    the rewards are; without, its texts are a selection. `logprobs`: its tokens and their log-probs."""

    every_prompt: bool = False
    logprobs: bool = False
