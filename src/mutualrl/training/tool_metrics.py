"""Metrics of rollouts with tools: turns, calls where none is needed, and calls that cannot be made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from mutualrl.adapter.trl_compat import GenerationBatch, HookedGRPOTrainer, tokenizer_of
from mutualrl.storage.metrics import INVALID_CALLS, OVER_CALLS, TURNS
from mutualrl.tasks.trajectories import names_of
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: column of the data that says whether a prompt needs a call
NEEDS_TOOL = "needs_tool"


class ToolCounts(NamedTuple):
    """Sums over rollouts. `turns`: messages that the policy wrote; `invalid`: calls that could not be parsed, or name
    no tool; `unneeded`: rollouts on prompts that need no call; `over_called`: of these, with a call."""

    rollouts: int = 0
    turns: int = 0
    invalid: int = 0
    unneeded: int = 0
    over_called: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics; over-calling only where the data say which prompts need no call."""
        metrics = {
            TURNS.key: self.turns / max(self.rollouts, 1),
            INVALID_CALLS.key: self.invalid / max(self.rollouts, 1),
        }
        return metrics | ({OVER_CALLS.key: self.over_called / self.unneeded} if self.unneeded else {})


def count(sampled: Trajectory, opened: int, tools: Iterable[str], needs_tool: object) -> ToolCounts:
    """Return the counts of what was sampled of a rollout. `opened`: calls that its tokens begin; `needs_tool`: value of
    that column."""
    calls = sampled.calls
    unknown = sum(call.name not in tools for call in calls)
    unneeded = needs_tool is False
    return ToolCounts(
        rollouts=1,
        turns=len(sampled.turns),
        invalid=max(opened - len(calls), 0) + unknown,
        unneeded=int(unneeded),
        over_called=int(unneeded and bool(calls)),
    )


def call_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return what begins a call in a response, by the tokenizer's response template; None without one."""
    template = getattr(tokenizer, "response_template", None) or {}
    calls = template.get("fields", {}).get("tool_calls", {})
    if "open_pattern" in calls:
        return re.compile(calls["open_pattern"])
    return re.compile(re.escape(calls["open"])) if "open" in calls else None


def tool_metrics(
    trainer: HookedGRPOTrainer, generation: GenerationBatch, schemas_of: Callable[[str | None], str]
) -> dict[str, float]:
    """Return the metrics of all rollouts that a round has sampled, of all ranks. `schemas_of`: environment to its
    tools."""
    parts = [each.generation for each in generation.dropped] or [generation]
    pattern, tokenizer = call_pattern(tokenizer_of(trainer)), tokenizer_of(trainer)
    names = {name: names_of(schemas_of(name)) for part in parts for name in _environments(part)}
    total = [0] * len(ToolCounts._fields)
    for part in parts:
        for row, ids, turns in zip(part.inputs, part.completion_ids, part.turns, strict=True):
            own = [token for token, sampled in zip(ids, turns.mask, strict=True) if sampled]
            opened = 0 if pattern is None else len(pattern.findall(tokenizer.decode(own)))
            sampled = Trajectory(tuple(message for message in turns.run.messages if message.sampled))
            counts = count(sampled, opened, names[turns.environment], row.get(NEEDS_TOOL))
            total = [before + new for before, new in zip(total, counts, strict=True)]
    sums = trainer.accelerator.reduce(torch.tensor(total, device=trainer.accelerator.device), reduction="sum")
    return ToolCounts(*sums.tolist()).metrics()


def _environments(generation: GenerationBatch) -> set[str | None]:
    return {turns.environment for turns in generation.turns}
