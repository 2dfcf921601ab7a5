"""Figure of sequential distillation, from the result of `mutualrl paper distill`."""

from __future__ import annotations

from pathlib import Path

from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.runs.curves import mean_bars
from mutualrl.runs.read import part
from mutualrl.storage.files import JsonObject, finite_number

#: name of the result in its directory
RESULT = "distill.json"


def distillation_bars(path: Path, result: JsonObject, slug: str) -> Figure | None:
    """Return the bars of a result: accuracy divided by standalone GRPO's, minus one."""
    learners = {
        name: learner_result
        for name, learner_result in part(result, "learners").items()
        if isinstance(learner_result, dict)
    }
    labels: JsonObject = {}
    for learner_result in learners.values():
        labels |= dict.fromkeys(part(learner_result, "bars"))
    bars = {}
    for label in labels:
        heights = {}
        for name, learner in learners.items():
            relative = finite_number(part(part(learner, "bars"), label).get("relative"))
            if relative is not None:
                heights[name] = [100 * relative]
        if heights:
            bars[label] = mean_bars(heights)
    if not bars:
        return None
    return Figure(
        slug,
        "Online gating versus sequential distillation",
        f"Greedy accuracy relative to standalone GRPO, per cent ({path.name}).",
        (Panel("against standalone GRPO", "per cent", bars=bars),),
        columns=1,
        paper="Online gating versus sequential offline distillation",
    )
