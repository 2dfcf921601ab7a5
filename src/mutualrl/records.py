"""The nouns of the system, and the one legend of shape suffixes.

Shape suffixes, used for arrays and ragged lists alike:
`_M` policies of the pool, `_P` prompts of a round, `_G` rollouts of a group (one prompt, one policy),
`_T` tokens of a sequence. `rewards_P_G[p][g]` is the reward of rollout g on prompt p.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: the text every policy sees, the canonical answer, and the group it is reported under.

    `messages`: (role, content) pairs where the problem is a conversation; `text` then holds their contents. `columns`:
    what else its row of data has, for the reward function. `facets`: further names that results are broken down by (the
    level of a problem). `solution`: a right completion, where the data have one.
    """

    id: str
    text: str
    answer: str
    group: str
    messages: tuple[tuple[str, str], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    facets: Mapping[str, str] = field(default_factory=dict, compare=False)
    solution: str | None = field(default=None, compare=False)

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The text, or the conversation in TRL's form."""
        return [{"role": role, "content": text} for role, text in self.messages] or self.text


def prompt_id(task: str, split: str, row: str | int, text: str) -> str:
    """Stable id of a prompt: task, split, row id and a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{task}/{split}/{row}/{digest}"


@dataclass(frozen=True, slots=True)
class Record:
    """One rollout as the exchange stores it: the paper's D = (id, x_text, y_text, r, A, trace, meta).

    Source: paper, Section "Dataflow in One Training Loop", paragraph SEE. Fields that the active regime
    does not publish are None. `ended` says that the rollout closed with an end-of-sequence token; a
    truncated rollout has `ended=False` and must never be given one.
    """

    prompt_id: str
    rollout: int
    reward: float
    ended: bool
    x_text: str | None = None
    y_text: str | None = None
    advantage: float | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated response: the sampled ids, their text, and whether it ended by itself."""

    token_ids: tuple[int, ...]
    text: str
    ended: bool
