"""What standalone runs found: all distinct verified successes in their exchange.

Source: paper, Section "Online Gating versus Sequential Peer Distillation", phase 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mutualrl.errors import DataError
from mutualrl.see.survey import Reader


class Success(NamedTuple):
    """A rollout that was rewarded: the prompt, and the text."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Harvest:
    """The successes of one policy over a run: `rollouts` in all, `rewarded` of them, `cut` of those not ended by an
    end-of-sequence token (left out: a learner would be taught to stop where the budget did), and the `distinct` rest,
    sorted."""

    rollouts: int
    rewarded: int
    cut: int
    distinct: tuple[Success, ...]


def harvest(exchange: Path, run_id: str, policy: str, above: float, expected: int) -> Harvest:
    """All distinct successes (reward > `above`) that a policy published in its `expected` rounds. Raises DataError when
    it published none, or no texts, or rounds are missing; ExchangeDamagedError when a byte does not match its
    marker."""
    reader = Reader(exchange, run_id)
    rounds = reader.rounds(policy)
    where = f"{exchange / policy}"
    if rounds and rounds != list(range(expected)):
        raise DataError(
            f"{where}: {len(rounds)} of the run's {expected} rounds are there; a harvest is of all of them: train "
            "without run.keep_rounds, and free nothing (exchange gc)"
        )
    if not rounds:
        raise DataError(
            f"{where}: no rollouts of {policy!r} are kept; a standalone run keeps them with: mutualrl train --regime "
            "grpo --exchange full"
        )
    rollouts = rewarded = cut = 0
    found: set[Success] = set()
    for round_ in rounds:
        shard = reader.read(policy, round_)
        if shard is None:
            continue
        rollouts += len(shard)
        rows = [row for row, reward in enumerate(shard.column("reward")) if reward > above]
        rewarded += len(rows)
        ids, ended = shard.column("prompt_id"), shard.column("ended")
        whole = [row for row in rows if ended[row]]
        cut += len(rows) - len(whole)
        for row, text in zip(whole, shard.texts(whole), strict=True):
            if text is None:
                raise DataError(f"{where}: round {round_} holds no texts; train with --exchange full")
            found.add(Success(ids[row], text))
    return Harvest(rollouts, rewarded, cut, tuple(sorted(found)))


class Lesson(NamedTuple):
    """A right text for a prompt, the prompt by its text: runs of different seeds number the same prompts
    differently."""

    prompt: str
    text: str


def lessons(harvests: Mapping[str, Harvest], texts: Mapping[str, Mapping[str, str]], learner: str) -> list[Lesson]:
    """What all others found, each text once a prompt, sorted. `texts`: of each policy its prompts' texts by id. Raises
    DataError for a prompt that is not among them."""
    found: set[Lesson] = set()
    for name, each in harvests.items():
        if name == learner:
            continue
        absent = sorted({success.prompt_id for success in each.distinct} - set(texts[name]))
        if absent:
            raise DataError(
                f"{len(absent)} prompts of {name!r} are not in its run's training data any more, such as "
                f"{absent[0]!r}; "
                "give the data that the run was trained on"
            )
        found |= {Lesson(texts[name][success.prompt_id], success.text) for success in each.distinct}
    return sorted(found)
