"""Accuracy, pass@k and fractions of an evaluation, from its rows of completions. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mutualrl.records import Prompt
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.base import Row
from mutualrl.tasks.scoring import breakdown, pass_at_k, standard_error


def k_values(samples: int) -> list[int]:
    """Return the reported k of pass@k: 1, 2, 4, ... and the number of samples."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def figures(prompts: Sequence[Prompt], rows: Sequence[Row], samples: int) -> JsonObject:
    """Return `{"n", "accuracy", "stderr", "by_group", "groups", "facets", "no_box", "truncated", "too_long",
    "unscorable", "pass_at_k"}` over all prompts, `samples` rows each in the prompts' order.

    accuracy: mean reward; stderr: over the prompts' mean rewards; no_box, truncated, too_long, unscorable (without a
    reward, which counts as 0): fractions of all completions. `groups` and `facets` (subject, level) map names to
    `{"n", "accuracy", "stderr"}`. Raises ValueError
    when the counts differ.
    """
    if not prompts or len(rows) != samples * len(prompts):
        raise ValueError(f"{len(rows)} completions for {len(prompts)} prompts, expected {samples} each")
    groups = [rows[start : start + samples] for start in range(0, len(rows), samples)]
    means, hits = [], []
    for prompt, group in zip(prompts, groups, strict=True):
        if any(row["prompt_id"] != prompt.id for row in group):
            raise ValueError("completions are not in the order of their prompts")
        means.append(sum(row["reward"] for row in group if not math.isnan(row["reward"])) / samples)
        hits.append(sum(row["reward"] == 1.0 for row in group))
    by_group = breakdown([p.group for p in prompts], means)
    facets = {}
    for name in sorted({name for p in prompts for name in p.facets}):
        facets[name] = breakdown([p.facets.get(name, "none") for p in prompts], means)
    summary = {
        "n": len(prompts),
        "accuracy": sum(means) / len(means),
        "stderr": standard_error(means),
        "by_group": {name: group["accuracy"] for name, group in by_group.items()},
        "groups": by_group,
        "facets": facets,
        "no_box": _fraction(rows, "no_box"),
        "truncated": sum(not row["ended"] for row in rows) / len(rows),
        "too_long": _fraction(rows, "too_long"),
        "unscorable": sum(math.isnan(row["reward"]) for row in rows) / len(rows),
        "tokens": sum(row["tokens"] for row in rows) / len(rows),
    }
    if samples > 1:
        pass_rates = {}
        for k in k_values(samples):
            pass_rates[str(k)] = sum(pass_at_k(samples, hit, k) for hit in hits) / len(hits)
        summary["pass_at_k"] = pass_rates
    return summary


def _fraction(rows: Sequence[Row], name: str) -> float | None:
    """Return the fraction of rows in which a column is true; None if it was not recorded."""
    if any(row[name] is None for row in rows):
        return None
    return sum(bool(row[name]) for row in rows) / len(rows)
