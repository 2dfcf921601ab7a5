"""Successes of standalone runs: all distinct verified successes in their exchange.

Source: paper, Section "Online Gating versus Sequential Peer Distillation", phase 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mutualrl.errors import DataError
from mutualrl.see.inspection import Reader
from mutualrl.see.store import Location


class VerifiedText(NamedTuple):
    """Rollout that was rewarded: the prompt, and the text."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class SuccessSet:
    """Successes of one policy over a run: `rollouts` in all, `rewarded` of them, `cut` of those not ended by an
    end-of-sequence token (left out: a learner would be taught to stop where the budget did), and the `distinct`
    rest, sorted."""

    rollouts: int
    rewarded: int
    cut: int
    distinct: tuple[VerifiedText, ...]


def collect_successes(exchange: Location, run_id: str, policy: str, above: float, expected: int) -> SuccessSet:
    """Return all distinct successes (reward > `above`) that a policy published in its `expected` rounds. Raises
    DataError when it published none, or no texts, or rounds are missing; ExchangeDamagedError when a byte does not
    match its marker."""
    reader = Reader(exchange, run_id)
    rounds = reader.rounds(policy)
    where = reader.location(policy)
    if rounds and rounds != list(range(expected)):
        raise DataError(
            f"{where}: {len(rounds)} of the run's {expected} rounds are there; all of them are needed: train "
            "without run.keep_rounds, and free nothing (exchange gc)"
        )
    if not rounds:
        raise DataError(
            f"{where}: no rollouts of {policy!r} are kept; a standalone run keeps them with: mutualrl train --regime "
            "grpo --exchange full"
        )
    rollouts = rewarded = cut = 0
    texts: set[VerifiedText] = set()
    for round_index in rounds:
        shard = reader.read(policy, round_index)
        if shard is None:
            continue
        rollouts += len(shard)
        rows = [row for row, reward in enumerate(shard.column("reward")) if reward > above]
        rewarded += len(rows)
        ids, ended = shard.column("prompt_id"), shard.column("ended")
        complete = [row for row in rows if ended[row]]
        cut += len(rows) - len(complete)
        for row, text in zip(complete, shard.texts(complete), strict=True):
            if text is None:
                raise DataError(f"{where}: round {round_index} holds no texts; train with --exchange full")
            texts.add(VerifiedText(ids[row], text))
    return SuccessSet(rollouts, rewarded, cut, tuple(sorted(texts)))


class DistillationExample(NamedTuple):
    """Right text for a prompt, the prompt by its text: runs of different seeds number the same prompts differently."""

    prompt: str
    text: str


def distillation_examples(
    success_sets: Mapping[str, SuccessSet], texts: Mapping[str, Mapping[str, str]], learner: str
) -> list[DistillationExample]:
    """Return what all others found, each text once per prompt, sorted. `texts`: of each policy its prompts' texts by
    id. Raises DataError for a prompt that is not among them."""
    examples: set[DistillationExample] = set()
    for name, each in success_sets.items():
        if name == learner:
            continue
        absent = sorted({success.prompt_id for success in each.distinct} - set(texts[name]))
        if absent:
            raise DataError(
                f"{len(absent)} prompts of {name!r} are not in its run's training data any more, such as "
                f"{absent[0]!r}; give the data that the run was trained on"
            )
        examples |= {DistillationExample(texts[name][success.prompt_id], success.text) for success in each.distinct}
    return sorted(examples)
