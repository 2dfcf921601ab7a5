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

from mutualrl.records import Rollout
from mutualrl.regimes import ExtraRow
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.trajectories import shown

LONGEST = 4000  # characters per text; truncation is marked
TextsOf = Callable[[Sequence[Sequence[int]]], list[str]]


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
        texts_of: TextsOf,
    ) -> None:
        """Append a round's rows, on the main rank. `rollouts`: the learner's own, of all ranks; `step`: the first
        optimizer step that uses the rows; `texts_of`: token ids to texts."""
        learnt = [row for row in rows if row.is_taught]
        if not learnt:
            return
        own_by_prompt: dict[str, list[Rollout]] = {row.prompt_id: [] for row in learnt}
        for rollout in rollouts:
            if rollout.prompt_id in own_by_prompt:
                own_by_prompt[rollout.prompt_id].append(rollout)
        own = [rollout for group in own_by_prompt.values() for rollout in sorted(group, key=lambda each: each.index)]
        answers: dict[str, list[JsonObject]] = {key: [] for key in own_by_prompt}
        for rollout, text in zip(own, own_texts(own, texts_of, shortened, LONGEST), strict=True):
            reward = rollout.reward if rollout.reward == rollout.reward else None
            answers[rollout.prompt_id].append({"text": text, "reward": reward})
        lines = []
        for row in learnt:
            line = {
                "step": step,
                "round": round_index,
                "prompt_id": row.prompt_id,
                "prompt": shortened(own_by_prompt[row.prompt_id][0].prompt or ""),
                "own": answers[row.prompt_id],
                "peer": row.source.policy,
                "rollout": row.source.rollout,
                "answer": shown(row.trajectory, LONGEST, shortened),
                **({"hint": shortened(row.hint)} if row.hint else {}),
            }
            lines.append(json.dumps(line, allow_nan=False) + "\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))


def own_texts(
    rollouts: Sequence[Rollout], texts_of: TextsOf, cut: Callable[[str, int], str], longest: int
) -> list[object]:
    """Return the text of each rollout, cut to `longest`; with tools, its turns."""
    texts = texts_of([() if each.token_ids is None else each.token_ids.tolist() for each in rollouts])
    logged: list[object] = []
    for rollout, text in zip(rollouts, texts, strict=True):
        run = rollout.trajectory
        logged.append(cut(text, longest) if run is None or run.is_text else shown(run, longest, cut))
    return logged


def shortened(text: str, length: int = LONGEST) -> str:
    """Return `text`, truncated to `length` characters with a note of how many are missing."""
    return text if len(text) <= length else f"{text[:length]} [... {len(text) - length} more characters]"
