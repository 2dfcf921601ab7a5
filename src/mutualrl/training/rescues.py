"""What a policy learnt from its peers, written down as it happens: `rescues.jsonl`, one line for every pair.

A line: `step`, `round`, `prompt_id`, `prompt`, the learner's own failures (`own`: `text`, `reward`), and whose text it
learnt (`peer`, `rollout`, `answer`). Texts are cut at LONGEST characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from mutualrl.regimes.base import Pair

LONGEST = 4000  # characters of a text; what is cut away is said


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """One of the learner's own rollouts on a prompt that it was rescued on."""

    rollout: int
    prompt: str
    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class RescueLog:
    """Appends to a policy's `rescues.jsonl`."""

    path: Path

    def write(
        self,
        round_: int,
        step: int,
        pairs: Sequence[Pair],
        own: Mapping[str, Sequence[OwnAnswer]],
        accelerator: Any,
    ) -> None:
        """Write a round's pairs. `own`: this rank's rollouts on their prompts. Every rank calls it, the main one
        writes; `step` is the first optimizer step that the round's pairs take part in."""
        answers: dict[str, list[OwnAnswer]] = {}
        for part in gather_object([dict(own)]):
            for prompt_id, found in part.items():
                answers.setdefault(prompt_id, []).extend(found)
        if not accelerator.is_main_process:
            return
        lines = []
        for pair in pairs:
            mine = sorted(answers[pair.prompt_id], key=lambda answer: answer.rollout)
            line = {
                "step": step,
                "round": round_,
                "prompt_id": pair.prompt_id,
                "prompt": shortened(mine[0].prompt),
                "own": [
                    {"text": shortened(a.text), "reward": a.reward if a.reward == a.reward else None} for a in mine
                ],
                "peer": pair.policy,
                "rollout": pair.rollout,
                "answer": shortened(pair.text),
            }
            lines.append(json.dumps(line, allow_nan=False) + "\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def shortened(text: str) -> str:
    """At most LONGEST characters, and how many are missing."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} [... {len(text) - LONGEST} more characters]"
