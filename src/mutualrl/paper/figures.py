"""The paper's figures of several runs, with their titles in the paper; drawn for anybody's arms that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mutualrl.regimes import baseline
from mutualrl.regimes.xgrpo import XGRPO
from mutualrl.reporting import multi_run
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.figure_specs import Figure, Panel, filled
from mutualrl.reporting.multi_run import (
    Arms,
    accuracy_figure,
    accuracy_panels,
    metric_of,
    panels_of,
    policy_names,
    pool_means,
    probe_arms,
    spread,
)
from mutualrl.runs.curves import mean_curve, tokens_per_second
from mutualrl.runs.logs import LoggedRun

PLAIN_TRL = "trl"  # the regime in run.json of a run of plain TRL (benchmarks/fidelity.py)
_PER_TASK = "Outcome-level transfer extends beyond the main MATH comparison (per-task bars)"
#: title in the paper by the end of a figure's name
_TITLES = {
    "probes": "Outcome-level sharing gives the best stability-support point (probe comparison)",
    "regularizers": "The regimes have distinct optimization signatures; SGT preserves entropy",
    "prp-ablation": "THL-aligned importance correction is required for tractable data-level sharing",
    "xgrpo-ablation": "XGRPO gains come from structured cross-policy normalization",
    "fidelity": "System sanity check on single-policy GRPO",
}


def figures(comparison: Comparison, slug: str) -> list[Figure]:
    """Return the figures for which a comparison has the arms."""
    drawn = multi_run.figures(comparison, slug, _ablations)
    fidelity = _fidelity(comparison.arms, slug)
    if fidelity is not None and fidelity.panels:
        drawn.append(fidelity)
    return [replace(figure, paper=_title(figure, slug, drawn)) for figure in drawn]


def _title(figure: Figure, slug: str, drawn: Sequence[Figure]) -> str:
    """Return a figure's title in the paper; accuracy by group stands for that by task where it was not measured."""
    kind = figure.name.removeprefix(f"{slug}-")
    if kind.startswith("tasks") or (kind == "groups" and not any(f.name == f"{slug}-tasks" for f in drawn)):
        return _PER_TASK
    return _TITLES.get(kind, "")


def _of_level(arms: Arms, level: str) -> dict[str, Sequence[LoggedRun]]:
    """Return the baseline and the arms that share at one of the paper's levels: published regimes first, then variants
    and controls."""
    grpo = baseline().name
    at_this_level = {arm: runs for arm, runs in arms.items() if runs[0].rule.level == level}
    probes = probe_arms(at_this_level)
    order = sorted(at_this_level, key=lambda arm: (arm not in probes, arm))
    return {arm: arms[arm] for arm in (grpo, *order) if arm in arms}


#: per ablation: file name, title, level of sharing
_ABLATIONS = (
    ("prp-ablation", "Importance correction under PRP", "data"),
    ("xgrpo-ablation", "Structured pool versus noise under XGRPO", "value"),
    ("sgt-variants", "SGT: weights, and the data's solution in place of a peer's", "outcome"),
)


def _ablations(arms: Arms, slug: str) -> list[Figure]:
    """Return one figure for each level that has a variant or a control."""
    figures = []
    for name, title, level in _ABLATIONS:
        selected = _of_level(arms, level)
        probes = probe_arms(selected)
        variants = [arm for arm, runs in selected.items() if runs[0].rule.level == level and arm not in probes]
        if len(selected) > 1 and variants:
            figures.append(accuracy_figure(selected, f"{slug}-{name}", title))
    return figures


def _fidelity(arms: Arms, slug: str) -> Figure | None:
    """Return a figure of mutualrl's grpo and plain TRL."""
    grpo = baseline().name
    if PLAIN_TRL not in arms or grpo not in arms:
        return None
    pair = {grpo: arms[grpo], PLAIN_TRL: arms[PLAIN_TRL]}
    panels = [
        *accuracy_panels(pair, average=False),
        *panels_of(pair, "training reward", "mean reward", metric_of("reward"), smoothed=True, average=False),
        *panels_of(
            pair,
            "speed on steps without validation",
            "tokens per second",
            lambda run, name: tokens_per_second(run, name, without_validation=True),
            smoothed=True,
            average=False,
        ),
        *panels_of(pair, "loss, with the KL penalty", "loss", metric_of("loss"), smoothed=True, average=False),
    ]
    return Figure(
        f"{slug}-fidelity",
        "Fidelity against plain TRL",
        "The same policies trained with mutualrl's regime grpo and with TRL's GRPOTrainer alone.",
        filled(*panels),
        columns=max(1, len(policy_names(pair))),
    )


def across(comparisons: Sequence[Comparison]) -> list[Figure]:
    """Return figures over several comparisons of one task: GRPO and XGRPO by pool."""
    by_task: dict[str, list[Panel]] = {}
    compared: dict[str, Sequence[LoggedRun]] = {}
    for comparison in comparisons:
        pair = (baseline().name, XGRPO.name)
        arms = {arm: runs for arm, runs in probe_arms(comparison.arms).items() if runs[0].info.regime in pair}
        if len(arms) == 2:
            compared |= {f"{comparison.name}: {arm}": runs for arm, runs in arms.items()}
            names = policy_names(arms)
            lines = {arm: mean_curve(pool_means(runs, names, LoggedRun.accuracy_of)) for arm, runs in arms.items()}
            panel = Panel(f"{comparison.name}: mean of the pool", "greedy accuracy", lines)
            by_task.setdefault(comparison.runs[0].task, []).append(panel)
    return [
        Figure(
            "value-level-pools" if number == 1 else f"value-level-pools-{number}",
            f"Value-level sharing across pools ({task})",
            f"Greedy validation accuracy, mean over the pool's policies; {spread(compared)}.",
            filled(*panels),
            columns=min(3, len(panels)),
            paper="Value-level sharing preserves the GRPO stability profile across model pools",
        )
        for number, (task, panels) in enumerate(by_task.items(), 1)
        if len(panels) > 1
    ]
