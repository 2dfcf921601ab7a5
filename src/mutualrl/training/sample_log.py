"""Log of what a policy sampled: `samples.jsonl`, at most `MOST` rollouts per round, for the page.

A line: `step`, `round`, `rollouts` (`prompt_id`, `prompt`, `text`, `reward`) and `taught` (`prompt_id`, `peer`,
`answer`, `from_hint`: the answer is its own, after the peer's text as a hint), the texts that the policy was taught on
these prompts. With tools, a text is a list of turns (`role`, `content`). Texts are cut to `TEXT_BYTES`. Rounds are
skipped evenly where the log could otherwise grow over `LOG_BYTES`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.records import Rollout
from mutualrl.regimes import ExtraRow
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.trajectories import cut, shown
from mutualrl.training.rescues import TextsOf, own_texts

MOST = 4  # rollouts per round
PROMPTS = 2  # prompts per round
TEXT_BYTES = 2_000  # per text, in UTF-8
ID_BYTES = 200  # per id of a prompt and name of a peer
#: the most that a line can have: prompt, completion and a taught text per rollout, and their ids
LINE_BYTES = MOST * (3 * TEXT_BYTES + 3 * ID_BYTES + 500)
LOG_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class SampleLog:
    """Writer of a policy's `samples.jsonl`."""

    path: Path

    def write(
        self,
        round_index: int,
        rounds: int,
        step: int,
        rows: Sequence[ExtraRow],
        rollouts: Iterable[Rollout],
        texts_of: TextsOf,
    ) -> float:
        """Append a round's samples, on the main rank; return the seconds that this took. `rounds`: planned rounds of
        the run; `step`: the first optimizer step of the round; the rest as `RescueLog.write`."""
        if round_index % every(rounds):
            return 0.0
        began = time.monotonic()
        learnt = [row for row in rows if row.is_taught]
        chosen = choose(rollouts, {row.prompt_id for row in learnt})
        prompts = {rollout.prompt_id for rollout in chosen}
        sampled = []
        for rollout, text in zip(chosen, own_texts(chosen, texts_of, cut, TEXT_BYTES), strict=True):
            sampled.append(
                {
                    "prompt_id": cut(rollout.prompt_id, ID_BYTES),
                    "prompt": cut(rollout.prompt or "", TEXT_BYTES),
                    "text": text,
                    "reward": rollout.reward if math.isfinite(rollout.reward) else None,
                }
            )
        taught: list[JsonObject] = []
        for row in learnt:
            if row.prompt_id in prompts and len(taught) < MOST:
                keys = {"prompt_id": cut(row.prompt_id, ID_BYTES), "peer": cut(row.source.policy, ID_BYTES)}
                taught.append({**keys, "answer": shown(row.trajectory, TEXT_BYTES, cut), "from_hint": bool(row.hint)})
        line = {"step": step, "round": round_index, "rollouts": sampled, "taught": taught}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        return time.monotonic() - began


def every(rounds: int) -> int:
    """Return k, so that the samples of every k-th of `rounds` rounds have at most `LOG_BYTES`."""
    return max(1, math.ceil(rounds * LINE_BYTES / LOG_BYTES))


def choose(rollouts: Iterable[Rollout], taught: Collection[str]) -> list[Rollout]:
    """Return the first rollout of the highest reward and the first of the lowest of `PROMPTS` prompts: those that the
    policy was taught on, then the others, each in the order of the batch. A reward that is NaN is the lowest."""
    by_prompt: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.prompt_id, []).append(rollout)
    prompts = sorted(by_prompt, key=lambda prompt_id: prompt_id not in taught)[:PROMPTS]
    chosen = []
    for prompt_id in prompts:
        group = sorted(by_prompt[prompt_id], key=lambda rollout: rollout.index)
        best = max(group, key=_reward)
        others = [rollout for rollout in group if rollout is not best]
        chosen += [best, *([min(others, key=_reward)] if others else [])]
    return chosen


def _reward(rollout: Rollout) -> float:
    return rollout.reward if math.isfinite(rollout.reward) else -math.inf
