"""Log of the texts that a policy learnt from its peers: `rescues.jsonl`, one line per text.

These are the nll rows, and the policy-gradient rows with a hint. A line: `step`, `round`,
`prompt_id`, `prompt`, the learner's own rollouts (`own`: `text`, `reward`), and the source and text of the row (`peer`,
`rollout`, `answer`). With a `hint`, which is of the source, the answer is the learner's own. Texts are truncated to
LONGEST characters; of a run with tools, a text is a list of turns (`role`, `content`) of LONGEST bytes together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.records import Ids, Rollout
from mutualrl.regimes import ExtraRow
from mutualrl.tasks.trajectories import from_json, turns_within

LONGEST = 4000  # characters per text; truncation is marked


@dataclass(frozen=True, slots=True)
class RescueLog:
    """Writer of a policy's `rescues.jsonl`."""

    path: Path

    def write(
        self,
        round_index: int,
        step: int,
        rows: Sequence[ExtraRow],
        rollouts: Sequence[Rollout],
        text_of: Callable[[Sequence[int] | Ids], str],
    ) -> None:
        """Append a round's rows, on the main rank. `rollouts`: the learner's own, of all ranks; `step`: the first
        optimizer step that uses the rows."""
        learnt = [row for row in rows if row.is_taught]
        if not learnt:
            return
        own_by_prompt: dict[str, list[Rollout]] = {row.prompt_id: [] for row in learnt}
        for rollout in rollouts:
            if rollout.prompt_id in own_by_prompt:
                own_by_prompt[rollout.prompt_id].append(rollout)
        lines = []
        for row in learnt:
            own = sorted(own_by_prompt[row.prompt_id], key=lambda rollout: rollout.index)
            answers = []
            for rollout in own:
                reward = rollout.reward if rollout.reward == rollout.reward else None
                text = _own_text(rollout, text_of)
                answers.append({"text": text, "reward": reward})
            line = {
                "step": step,
                "round": round_index,
                "prompt_id": row.prompt_id,
                "prompt": shortened(own[0].prompt or ""),
                "own": answers,
                "peer": row.source.policy,
                "rollout": row.source.rollout,
                "answer": turns_within(from_json(row.messages), LONGEST) if row.messages else shortened(row.text),
                **({"hint": shortened(row.hint)} if row.hint else {}),
            }
            lines.append(json.dumps(line, allow_nan=False) + "\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def _own_text(rollout: Rollout, text_of: Callable[[Sequence[int] | Ids], str]) -> object:
    """Return the text of a rollout, or its turns with tools."""
    if rollout.messages is not None:
        return turns_within(from_json(rollout.messages), LONGEST)
    return shortened(text_of(() if rollout.token_ids is None else rollout.token_ids))


def shortened(text: str, length: int = LONGEST) -> str:
    """Return `text`, truncated to `length` characters with a note of how many are missing."""
    return text if len(text) <= length else f"{text[:length]} [... {len(text) - length} more characters]"
