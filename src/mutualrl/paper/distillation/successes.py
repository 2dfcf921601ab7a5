"""Successes of standalone runs: all distinct verified successes in their exchange.

Source: paper, Section "Online Gating versus Sequential Peer Distillation", phase 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mutualrl.errors import DataError
from mutualrl.see.inspection import Reader
from mutualrl.see.store import Location
from mutualrl.thl import last_tokens


class VerifiedText(NamedTuple):
    """Rewarded rollout: its prompt and text."""

    prompt_id: str
    text: str


@dataclass(frozen=True, slots=True)
class SuccessSet:
    """Successes of one policy over a run: counts of all `rollouts`, of the `rewarded` ones, and of those `cut` without
    an end-of-sequence token (left out: they would teach a learner to stop at the token limit), and the `distinct` rest,
    sorted. `end_tokens`: how often each token ended a rollout."""

    rollouts: int
    rewarded: int
    cut: int
    distinct: tuple[VerifiedText, ...]
    end_tokens: Mapping[int, int] = field(default_factory=dict)


def collect_successes(exchange: Location, run_id: str, policy: str, above: float, expected: int) -> SuccessSet:
    """Return all distinct successes (reward > `above`) that a policy published in its `expected` rounds. Raises
    DataError if it published none or no texts, or if rounds are missing; ExchangeDamagedError if a shard does not match
    its marker."""
    reader = Reader(exchange, run_id)
    rounds = reader.rounds(policy)
    location = reader.location(policy)
    if rounds and rounds != list(range(expected)):
        raise DataError(
            f"{location}: found {len(rounds)} of the run's {expected} rounds, expected all: train without "
            "run.keep_rounds, and do not run `mutualrl exchange gc`"
        )
    if not rounds:
        raise DataError(
            f"{location}: found no rollouts of {policy!r}; a standalone run keeps them with: mutualrl train --regime "
            "grpo --exchange full"
        )
    rollouts = rewarded = cut = 0
    texts: set[VerifiedText] = set()
    end_tokens: Counter[int] = Counter()
    for round_index in rounds:
        shard = reader.read(policy, round_index)
        if shard is None:
            continue
        rollouts += len(shard)
        rows = [row for row, reward in enumerate(shard.rewards) if reward > above]
        rewarded += len(rows)
        ids, ended = shard.prompt_ids, shard.ended
        end_tokens.update(last_tokens(zip(shard.token_ids, ended, strict=True)))
        complete = [row for row in rows if ended[row]]
        cut += len(rows) - len(complete)
        for row, text in zip(complete, shard.texts(complete), strict=True):
            if text is None:
                raise DataError(f"{location}: round {round_index} has no texts; train with --exchange full")
            texts.add(VerifiedText(ids[row], text))
    return SuccessSet(rollouts, rewarded, cut, tuple(sorted(texts)), end_tokens)


class DistillationExample(NamedTuple):
    """Correct text for a prompt, itself as text: runs of different seeds number the same prompts differently."""

    prompt: str
    text: str


def distillation_examples(
    success_sets: Mapping[str, SuccessSet], texts: Mapping[str, Mapping[str, str]], learner: str
) -> list[DistillationExample]:
    """Return the successes of all other policies, each text once per prompt, sorted. `texts`: each policy's prompt
    texts by id. Raises DataError for a prompt that is not among them."""
    examples: set[DistillationExample] = set()
    for name, successes in success_sets.items():
        if name == learner:
            continue
        missing = sorted({success.prompt_id for success in successes.distinct} - set(texts[name]))
        if missing:
            raise DataError(
                f"{len(missing)} prompts of {name!r} are no longer in its run's training data, e.g. {missing[0]!r}; "
                "use the data that the run was trained on"
            )
        examples |= {DistillationExample(texts[name][s.prompt_id], s.text) for s in successes.distinct}
    return sorted(examples)
