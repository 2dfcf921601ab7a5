"""Answers on a hint: which of them a learner may learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mutualrl.regimes.advantages import pool_advantages, standard_deviation, ungroup
from mutualrl.regimes.gating import Candidate
from mutualrl.regimes.round import RoundView, Sample, Sampled
from mutualrl.seeds import seeded
from mutualrl.tasks.boxed import last_boxed


@dataclass(frozen=True, slots=True)
class Shown:
    """Hint of a prompt: its text, and the success that it is from (None with `hint: none`)."""

    text: str
    success: Candidate | None


@dataclass(frozen=True, slots=True)
class HintedAnswer:
    """Sampled answer: whether it is a success; if so, the share of it that is copied, whether it is bare, whether it
    made no call where the hinted run made one, and whether its calls are that run's, in its order."""

    sample: Sample
    drawn: Sampled
    success: bool
    copied: float
    bare: bool
    uncalled: bool = False
    followed: bool = False

    @classmethod
    def of(cls, sample: Sample, drawn: Sampled, hinted: Candidate | None, success_above: float) -> HintedAnswer:
        """Return what a sampled answer is. `hinted`: the success that was its hint."""
        success = drawn.reward > success_above
        calls = drawn.trajectory.calls
        planned = [] if hinted is None else hinted.trajectory.calls
        bare = success and not calls and is_bare(drawn.trajectory.answer)
        copied = longest_common_substring(drawn.words, drawn.hint_ids) / max(len(drawn.words), 1) if success else 0.0
        uncalled = success and bool(planned) and not calls
        return cls(sample, drawn, success, copied, bare, uncalled, success and calls == planned and bool(calls))

    def is_left_out(self, max_copy: float) -> bool:
        """Return whether it is left out: a confirmed one that is a copy, bare, or without the call that the hinted run
        made: learning it would teach to guess."""
        return self.copied >= max_copy or self.bare or self.uncalled


def is_bare(text: str) -> bool:
    r"""Return whether an answer is nothing but its final answer: without its last `\boxed{...}`, no letter or digit is
    left; without a box, it has no more than one word (of ASCII: other scripts may have no spaces)."""
    boxed = last_boxed(text)
    if boxed is None:
        return len(text.split()) < 2 and text.isascii()
    before, _, after = text.rpartition(f"\\boxed{{{boxed}}}")
    return not any(character.isalnum() for character in before + after)


def longest_common_substring(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest run of tokens that two sequences share: O(len(a) * len(b)), one row at a
    time."""
    first, second = np.asarray(a), np.asarray(b)
    if not first.size or not second.size:
        return 0
    longest, before = 0, np.zeros(len(second) + 1, dtype=np.int64)
    for token in first:
        row = np.zeros_like(before)
        row[1:] = np.where(second == token, before[:-1] + 1, 0)
        longest = max(longest, int(row.max()))
        before = row
    return longest


def of_another_prompt(drawn: Mapping[str, Candidate], view: RoundView) -> dict[str, Candidate]:
    """Return for each prompt the success drawn for another one, every success used once: a cycle in random order. A
    single prompt has no other: none."""
    prompts = sorted(drawn)
    if len(prompts) < 2:
        return {}
    order = seeded(view.run_seed, view.round, "shuffled hints", view.learner).permutation(len(prompts))
    cycle = [prompts[place] for place in order]
    return {prompt_id: drawn[cycle[place - 1]] for place, prompt_id in enumerate(cycle)}


def pooled_advantages(view: RoundView, answers: Sequence[HintedAnswer]) -> tuple[tuple[float, ...], list[float]]:
    """Return the own advantages and those of answers, over the group of a prompt's own rollouts and answers.

    Own advantages change by the difference to those over the own rollouts alone, so that what a regime before this one
    has changed stays. Whitened ones are computed anew (`whitened_plan` whitens them).
    """
    own = view.own_groups()
    rewards: dict[str, list[float]] = {prompt_id: [] for prompt_id in own}
    for answer in answers:
        rewards[answer.sample.prompt_id].append(answer.drawn.reward)
    everything = [*view.rewards, *(answer.drawn.reward for answer in answers)]
    alone, together = standard_deviation(view.rewards), standard_deviation(everything)
    changes: dict[str, list[float]] = {}
    graded: dict[str, list[float]] = {}
    for prompt_id, group in rewards.items():
        mine, pool = own[prompt_id], [*own[prompt_id], *group]
        local = pool_advantages(mine, mine, scale=view.scale, batch_standard_deviation=alone)
        deviation = together if group else alone
        pooled = pool_advantages(pool, pool, scale=view.scale, batch_standard_deviation=deviation)
        changes[prompt_id] = (pooled[: len(mine)] - (0.0 if view.whiten else local)).tolist()
        graded[prompt_id] = pooled[len(mine) :].tolist()
    difference = ungroup(view.prompt_ids, changes)
    before = [0.0] * len(difference) if view.whiten else view.advantages
    advantages = tuple(old + new for old, new in zip(before, difference, strict=True))
    of_answers, places = list[float](), Counter[str]()
    for answer in answers:
        key = answer.sample.prompt_id
        of_answers.append(graded[key][places[key]])
        places[key] += 1
    return advantages, of_answers
