"""Figures of runs side by side: the paper's, drawn from our data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from mutualrl.regimes import at_level, baseline
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.figure_specs import Bars, Figure, Panel, filled, over
from mutualrl.reporting.run_reader import Evaluation, Point, PolicyRun, Run
from mutualrl.reporting.series import mean_of, policies_of, standard_deviation, tokens_per_second

PLAIN_TRL = "trl"  # the regime in run.json of a run of plain TRL (benchmarks/fidelity.py)
Arms = Mapping[str, Sequence[Run]]


def figures(comparison: Comparison, slug: str) -> list[Figure]:
    """Return the paper's figures that a comparison has the arms for."""
    arms = comparison.arms
    main = _main(arms)
    drawn = [
        _probes(main, slug, _elsewhere(arms, main)),
        _regularizers(main, slug, _elsewhere(arms, main)),
        _gates(arms, slug),
        *(ablations := _ablations(arms, slug)),
        _further(arms, {*main, *(line.label for f in ablations for panel in f.panels for line in panel.lines)}, slug),
        _fidelity(arms, slug),
        *(evaluated := _evaluations(arms, slug)),
        _group_bars(arms, slug, paper="" if evaluated else PER_TASK),
    ]
    return [figure for figure in drawn if figure is not None and figure.panels]


MOST_ARMS = 6  # in one panel


def _main(arms: Arms) -> Arms:
    """Return the paper's probes among many arms: each regime as published; the others have figures of their own."""
    probes = _probe_arms(arms)
    return probes if len(arms) > MOST_ARMS and len(probes) > 1 else arms


def _probe_arms(arms: Arms) -> Arms:
    """Return one arm per regime: no ablation and no control, and of several the one with the fewest settings of its
    own."""
    chosen: dict[str, str] = {}
    for arm, runs in arms.items():
        regime = runs[0].regime
        if not runs[0].is_variant and (regime not in chosen or arm.count("=") < chosen[regime].count("=")):
            chosen[regime] = arm
    return {arm: runs for arm, runs in arms.items() if arm in chosen.values()}


def _elsewhere(arms: Arms, main: Arms) -> str:
    """Return a note about the arms that a figure has no room for."""
    rest = [arm for arm in arms if arm not in main]
    return f" In the figures below: {', '.join(rest)}." if rest else ""


def _of_level(arms: Arms, level: str) -> dict[str, Sequence[Run]]:
    """Return the baseline, and the arms that share at a level of the paper's: as it stands first, then variants,
    controls."""
    plain = baseline().name
    chosen = {arm: runs for arm, runs in arms.items() if runs[0].rule.level == level}
    probes = _probe_arms(chosen)
    order = sorted(chosen, key=lambda arm: (arm not in probes, arm))
    return {arm: arms[arm] for arm in (plain, *order) if arm in arms}


Take = Callable[[PolicyRun], list[Point]]


def _names(arms: Arms) -> list[str]:
    return policies_of([run for runs in arms.values() for run in runs])


def _panels(arms: Arms, what: str, unit: str, take: Take, *, smooth: bool, average: bool) -> list[Panel]:
    """Return a panel per policy, and one of the mean over the pool; a line per arm."""
    names, panels = _names(arms), []
    for name in names:
        lines = []
        for arm, runs in arms.items():
            curves = [take(policy) for policy in _there(runs, name)]
            lines.append(over(arm, curves, smooth=smooth))
        panels.append(Panel(f"{name}: {what}", unit, tuple(lines)))
    if average and len(names) > 1:
        means = tuple(over(arm, _pool_means(runs, names, take), smooth=smooth) for arm, runs in arms.items())
        panels.append(Panel(f"mean of the pool: {what}", unit, means))
    return panels


def _pool_means(runs: Sequence[Run], names: Sequence[str], take: Take) -> list[list[Point]]:
    """Return the mean over the pool's policies in every run in which none was lost."""
    means = []
    for run in runs:
        if _whole(run):
            means.append(mean_of([take(run.policies[name]) for name in names]))
    return means


def _accuracy_panels(arms: Arms, *, average: bool) -> list[Panel]:
    return _panels(
        arms, "validation accuracy", "greedy accuracy", lambda p: p.accuracy(), smooth=False, average=average
    )


def _accuracy_figure(arms: Arms, name: str, title: str, paper: str = "") -> Figure:
    """Return validation accuracy of each policy and of the pool."""
    return Figure(
        name,
        title,
        f"Greedy validation accuracy; {_spread(arms)}.",
        filled(*_accuracy_panels(arms, average=True)),
        columns=_columns(arms),
        paper=paper,
    )


def _there(runs: Sequence[Run], name: str) -> list[PolicyRun]:
    """Return the policy in the runs, but for those that ended without it."""
    return [run.policies[name] for run in runs if run.state != "finished" or run.policies[name].result is not None]


def _whole(run: Run) -> bool:
    return run.state != "finished" or all(policy.result is not None for policy in run.policies.values())


def _spread(arms: Arms) -> str:
    """Return what a line is: of one run its own values, of several their mean with a band."""
    if all(len(runs) == 1 for runs in arms.values()):
        return "one run per arm"
    return "mean over runs, the band is one standard deviation (n - 1)"


def _columns(arms: Arms) -> int:
    names = len(_names(arms))
    return names + 1 if 1 < names < 4 else max(1, min(names, 4))


def _probes(arms: Arms, slug: str, elsewhere: str) -> Figure:
    return Figure(
        f"{slug}-probes",
        "Probe comparison",
        "Greedy validation accuracy (top) and training reward (below, moving mean) of each policy and of the pool's "
        f"mean; {_spread(arms)}.{elsewhere}",
        filled(
            *_accuracy_panels(arms, average=True),
            *_panels(arms, "training reward", "mean reward", lambda p: p.series("reward"), smooth=True, average=True),
        ),
        columns=_columns(arms),
        paper="Outcome-level sharing gives the best stability-support point (probe comparison)",
    )


def _regularizers(arms: Arms, slug: str, elsewhere: str) -> Figure:
    panels: list[Panel] = []
    for what, key in (("entropy", "entropy"), ("PPO KL", "ppo_kl"), ("KL loss", "kl")):
        panels += _panels(arms, what, "nats per token", lambda p, key=key: p.series(key), smooth=True, average=False)  # type: ignore[misc]
    return Figure(
        f"{slug}-regularizers",
        "Optimization diagnostics by regime",
        f"Entropy, PPO KL and KL to the model before training; moving means, {_spread(arms)}.{elsewhere}",
        filled(*panels),
        columns=max(1, len(_names(arms))),
        paper="The regimes have distinct optimization signatures; SGT preserves entropy",
    )


def _gates(arms: Arms, slug: str) -> Figure:
    return Figure(
        f"{slug}-gate",
        "Gate rate over time",
        f"Share of a round's prompts that the gate opens on; moving mean, {_spread(arms)}.",
        filled(
            *_panels(
                arms,
                "gate rate",
                "share of the prompts",
                lambda p: p.by_role("gate_rate"),
                smooth=True,
                average=False,
            )
        ),
        columns=max(1, min(len(_names(arms)), 3)),
    )


#: of each ablation: file, title, figure of the paper, level of sharing
_ABLATIONS = (
    (
        "prp-ablation",
        "Importance correction under PRP",
        "THL-aligned importance correction is required for tractable data-level sharing",
        "data",
    ),
    (
        "xgrpo-ablation",
        "Structured pool against noise under XGRPO",
        "XGRPO gains come from structured cross-policy normalization",
        "value",
    ),
    ("sgt-variants", "SGT: weights, and the data's solution in place of a peer's", "", "outcome"),
)


def _ablations(arms: Arms, slug: str) -> list[Figure]:
    """Return a figure per level at which some arm is a variant or a control."""
    figures = []
    for name, title, paper, level in _ABLATIONS:
        chosen = _of_level(arms, level)
        probes = _probe_arms(chosen)
        varied = [arm for arm, runs in chosen.items() if runs[0].rule.level == level and arm not in probes]
        if len(chosen) > 1 and varied:
            figures.append(_accuracy_figure(chosen, f"{slug}-{name}", title, paper))
    return figures


def _further(arms: Arms, shown: set[str], slug: str) -> Figure | None:
    """Return arms that no other figure has room for, beside GRPO."""
    plain = baseline().name
    rest = {arm: runs for arm, runs in arms.items() if arm not in shown or arm == plain}
    if not set(rest) - {plain}:
        return None
    return _accuracy_figure(rest, f"{slug}-further-arms", "Further arms")


def _fidelity(arms: Arms, slug: str) -> Figure | None:
    """Return our grpo beside plain TRL."""
    plain = baseline().name
    if PLAIN_TRL not in arms or plain not in arms:
        return None
    chosen = {plain: arms[plain], PLAIN_TRL: arms[PLAIN_TRL]}
    panels = [
        *_accuracy_panels(chosen, average=False),
        *_panels(chosen, "training reward", "mean reward", lambda p: p.series("reward"), smooth=True, average=False),
        *_panels(
            chosen,
            "speed on steps without validation",
            "tokens per second",
            lambda p: tokens_per_second(p, without_validation=True),
            smooth=True,
            average=False,
        ),
        *_panels(chosen, "policy-gradient loss", "loss", lambda p: p.series("loss"), smooth=True, average=False),
    ]
    return Figure(
        f"{slug}-fidelity",
        "Fidelity against plain TRL",
        "The same policies through mutualrl's regime grpo and through TRL's GRPOTrainer alone.",
        filled(*panels),
        columns=max(1, len(_names(chosen))),
        paper="System sanity check on single-policy GRPO",
    )


PER_TASK = "Outcome-level transfer extends beyond the main MATH comparison (per-task bars)"


def _evaluations(arms: Arms, slug: str) -> list[Figure]:
    """Return accuracy by task of every evaluation that some arm's runs have, policy by policy."""
    by_how: dict[str, dict[str, list[Evaluation]]] = {}
    for arm, runs in arms.items():
        for run in runs:
            for evaluation in run.evaluations:
                by_how.setdefault(evaluation.how, {}).setdefault(arm, []).append(evaluation)
    return [_task_bars(of_arms, arms, slug, number) for number, of_arms in enumerate(by_how.values(), 1)]


def _task_bars(of_arms: Mapping[str, Sequence[Evaluation]], arms: Arms, slug: str, number: int) -> Figure:
    tasks = next(iter(of_arms.values()))[0].tasks
    panels = []
    for name in _names(arms):
        bars = []
        for arm, evaluations in of_arms.items():
            by_task: dict[str, list[float]] = {task: [] for task in tasks}
            for evaluation in evaluations:
                for task, accuracy in evaluation.accuracy.get(name, {}).items():
                    by_task[task].append(accuracy)
            bars.append(_mean_bars(arm, by_task))
        panels.append(Panel(f"{name}: accuracy by task", "accuracy", bars=tuple(bars)))
    missing = [arm for arm in arms if arm not in of_arms]
    without = f" Without this evaluation: {', '.join(missing)}." if missing else ""
    return Figure(
        f"{slug}-tasks" if number == 1 else f"{slug}-tasks-{number}",
        "Accuracy by task",
        f"Accuracy of the trained models by task (mutualrl eval); {_spread(arms)}.{without}",
        filled(*panels),
        columns=1 if len(tasks) > 4 else max(1, min(len(panels), 2)),
        paper=PER_TASK,
    )


def _group_bars(arms: Arms, slug: str, paper: str) -> Figure | None:
    """Return accuracy by group (of a mixture: by task) before training and after each arm."""
    names = _names(arms)
    ended: dict[str, list[Run]] = {}
    group_names: set[str] = set()
    for arm, runs in arms.items():
        for run in runs:
            if run.state == "finished":
                ended.setdefault(arm, []).append(run)
                group_names.update(*(run.policies[name].groups for name in names))
    groups = sorted(group_names)
    if not 1 < len(groups) <= 12 or not names:
        return None
    panels = []
    for name in names:
        first = next(iter(ended.values()))
        bars = [_bars("before training", groups, first, name, before=True)]
        bars += [_bars(arm, groups, runs, name, before=False) for arm, runs in ended.items()]
        panels.append(Panel(f"{name}: final accuracy by group", "greedy accuracy", bars=tuple(b for b in bars if b)))
    return Figure(
        f"{slug}-groups",
        "Accuracy by group",
        f"Greedy accuracy at the end by group (of a mixture: by task); {_spread(arms)}.",
        filled(*panels),
        columns=1 if len(groups) > 4 else max(1, min(len(names), 2)),
        paper=paper,
    )


def _bars(label: str, groups: Sequence[str], runs: Sequence[Run], name: str, *, before: bool) -> Bars:
    finals: dict[str, list[float]] = {}
    for group in groups:
        curves = [curve for policy in _there(runs, name) if (curve := policy.accuracy(group))]
        finals[group] = [curve[0 if before else -1].value for curve in curves if not before or curve[0].step == 0]
    return _mean_bars(label, finals)


def _mean_bars(label: str, values: Mapping[str, Sequence[float]]) -> Bars:
    """Return the mean of each category that has values, with their spread where there are several."""
    there = {category: of for category, of in values.items() if of}
    means = tuple(statistics.fmean(of) for of in there.values())
    errors = tuple(standard_deviation(of) if len(of) > 1 else None for of in there.values())
    return Bars(label, tuple(there), means, errors)


def across(comparisons: Sequence[Comparison]) -> list[Figure]:
    """Return figures over several comparisons of one task: GRPO and XGRPO pool by pool."""
    by_task: dict[str, list[Panel]] = {}
    compared: dict[str, Sequence[Run]] = {}
    for comparison in comparisons:
        pair = (baseline().name, at_level("value").name)
        arms = {arm: runs for arm, runs in _probe_arms(comparison.arms).items() if runs[0].regime in pair}
        if len(arms) == 2:
            compared |= {f"{comparison.name}: {arm}": runs for arm, runs in arms.items()}
            names = _names(arms)
            lines = tuple(
                over(arm, _pool_means(runs, names, lambda policy: policy.accuracy())) for arm, runs in arms.items()
            )
            panel = Panel(f"{comparison.name}: mean of the pool", "greedy accuracy", lines)
            by_task.setdefault(comparison.runs[0].task, []).append(panel)
    return [
        Figure(
            "value-level-pools" if number == 1 else f"value-level-pools-{number}",
            f"Value-level sharing across pools ({task})",
            f"Greedy validation accuracy, mean over the pool's policies; {_spread(compared)}.",
            filled(*panels),
            columns=min(3, len(panels)),
            paper="Value-level sharing preserves the GRPO stability profile across model pools",
        )
        for number, (task, panels) in enumerate(by_task.items(), 1)
        if len(panels) > 1
    ]
