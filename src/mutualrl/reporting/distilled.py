"""The figure of a sequential distillation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutualrl.reporting.plots import Bars, Figure, Panel
from mutualrl.reporting.reading import number, part


def distillation_bars(path: Path, result: Mapping[str, Any], slug: str) -> Figure | None:
    """The bars of `mutualrl distill`: accuracy over standalone GRPO's, minus one."""
    learners = {name: about for name, about in part(result, "learners").items() if isinstance(about, dict)}
    labels = list(dict.fromkeys(label for about in learners.values() for label in part(about, "bars")))
    bars = []
    for label in labels:
        found = {
            name: value
            for name, about in learners.items()
            if (value := number(part(part(about, "bars"), label).get("relative"))) is not None
        }
        if found:
            bars.append(Bars(label, tuple(found), tuple(100 * value for value in found.values()), ()))
    if not bars:
        return None
    return Figure(
        slug,
        "Online gating versus sequential distillation",
        f"Greedy accuracy relative to standalone GRPO, per cent ({path.name}).",
        (Panel("against standalone GRPO", "per cent", bars=tuple(bars)),),
        columns=1,
        paper="Online gating versus sequential offline distillation",
    )
