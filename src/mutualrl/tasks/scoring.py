"""Accuracy of completions, overall and by group."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mutualrl.records import Prompt
from mutualrl.storage.run_info import Validation
from mutualrl.tasks.boxed import boxed_score, last_boxed


def score(prompts: Sequence[Prompt], completions: Sequence[str]) -> Validation:
    """Score one completion per prompt. Raises ValueError if there are none, or the counts differ."""
    if not prompts or len(prompts) != len(completions):
        raise ValueError(f"{len(completions)} completions for {len(prompts)} prompts; expected one each")
    hits = [boxed_score(text, prompt.answer) for prompt, text in zip(prompts, completions, strict=True)]
    return _averaged(prompts, hits, sum(last_boxed(text) is None for text in completions) / len(completions))


def score_rewards(prompts: Sequence[Prompt], rewards: Sequence[float]) -> Validation:
    """Return the mean reward in place of accuracy, for tasks with their own reward functions; boxes are not checked.
    A NaN (unscorable) counts as 0 and is counted.

    Raises ValueError if there are none, or the counts differ.
    """
    if not prompts or len(prompts) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards for {len(prompts)} prompts; expected one each")
    unscorable = sum(map(math.isnan, rewards))
    validation = _averaged(prompts, [0.0 if math.isnan(reward) else reward for reward in rewards], None)
    return validation.model_copy(update={"unscorable": unscorable})


def _averaged(prompts: Sequence[Prompt], hits: list[float], no_box: float | None) -> Validation:
    groups: dict[str, list[float]] = {}
    for prompt, hit in zip(prompts, hits, strict=True):
        groups.setdefault(prompt.group, []).append(hit)
    return Validation(
        n=len(hits),
        accuracy=sum(hits) / len(hits),
        by_group={name: sum(group) / len(group) for name, group in sorted(groups.items())},
        sizes={name: len(group) for name, group in sorted(groups.items())},
        no_box=no_box,
        solved="".join("1" if hit > 0.5 else "0" for hit in hits),
    )


def standard_error(values: Sequence[float]) -> float | None:
    """Return s / sqrt(n) with the standard deviation s (n - 1), as in lm-evaluation-harness; None for fewer than two
    values."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the unbiased estimate, from c successes in n samples, of the probability that
    at least one of k samples succeeds (Chen et al. 2021). Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"pass@{k} of {successes} successes in {samples} samples; expected 1 <= k <= n, 0 <= c <= n")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def breakdown(names: Sequence[str], values: Sequence[float]) -> dict[str, dict[str, object]]:
    """Return `{name: {"n", "accuracy", "stderr"}}` of the values under each name, sorted."""
    groups: dict[str, list[float]] = {}
    for name, value in zip(names, values, strict=True):
        groups.setdefault(name, []).append(value)
    return {
        name: {"n": len(group), "accuracy": sum(group) / len(group), "stderr": standard_error(group)}
        for name, group in sorted(groups.items())
    }
