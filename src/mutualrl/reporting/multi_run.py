"""Figures that compare the arms of several runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mutualrl.process.status import RunState
from mutualrl.regimes import baseline
from mutualrl.reporting.comparability import Comparison
from mutualrl.reporting.figure_specs import Figure, Panel, filled
from mutualrl.reporting.signs import BEFORE
from mutualrl.runs.curves import Bars, Curve, curve, mean, mean_bars, mean_curve, policies_of, smooth
from mutualrl.runs.logs import LoggedRun, Series
from mutualrl.runs.record import StoredEvaluation, measure_of

Arms = Mapping[str, Sequence[LoggedRun]]


def figures(comparison: Comparison, slug: str, studies: Callable[[Arms, str], list[Figure]]) -> list[Figure]:
    """Return the figures for which a comparison has the arms. `studies`: returns figures of some arms; the arms that
    neither they nor the main figures show have a figure of their own."""
    arms = comparison.arms
    main = _main(arms)
    of_studies = studies(arms, slug)
    shown = {*main, *(label for figure in of_studies for panel in figure.panels for label in panel.lines)}
    drawn = [
        _probes(main, slug, _omitted_arms(arms, main)),
        _regularizers(main, slug, _omitted_arms(arms, main)),
        _gates(arms, slug),
        *of_studies,
        _further(arms, shown, slug),
        *_evaluations(arms, slug),
        _group_bars(arms, slug),
    ]
    return [figure for figure in drawn if figure is not None and figure.panels]


MOST_ARMS = 6  # in one panel


def _main(arms: Arms) -> Arms:
    """Return the arms of the main figures: of many arms, each regime as published; others have separate figures."""
    probes = probe_arms(arms)
    return probes if len(arms) > MOST_ARMS and len(probes) > 1 else arms


def probe_arms(arms: Arms) -> Arms:
    """Return one arm per regime: neither an ablation nor a control, with the fewest non-default settings."""
    chosen: dict[str, str] = {}
    for arm, runs in arms.items():
        regime = runs[0].info.regime
        if not runs[0].is_variant and (regime not in chosen or arm.count("=") < chosen[regime].count("=")):
            chosen[regime] = arm
    return {arm: runs for arm, runs in arms.items() if arm in chosen.values()}


def _omitted_arms(arms: Arms, main: Arms) -> str:
    """Return a note listing the arms that the main figures omit."""
    omitted = [arm for arm in arms if arm not in main]
    return f" In the figures below: {', '.join(omitted)}." if omitted else ""


Extract = Callable[[LoggedRun, str], Series]  # of a policy of a run


def metric_of(key: str) -> Extract:
    """Return what extracts a metric."""
    return lambda run, name: run.series(name, key)


def policy_names(arms: Arms) -> list[str]:
    """Return the policies of all runs."""
    return policies_of(_all(arms))


def _all(arms: Arms) -> list[LoggedRun]:
    return [run for runs in arms.values() for run in runs]


def panels_of(arms: Arms, metric: str, unit: str, extract: Extract, *, smoothed: bool, average: bool) -> list[Panel]:
    """Return one panel per policy and one for the mean over the pool, with one curve per arm."""
    names, panels = policy_names(arms), []
    transform = smooth if smoothed else _unchanged
    for name in names:
        lines: dict[str, Curve] = {}
        singles: dict[str, tuple[str, Curve]] = {}
        for arm, runs in arms.items():
            by_run = {run.name: transform(extract(run, name)) for run in _with_policy(runs, name)}
            lines[arm] = mean_curve(by_run.values())
            if len(by_run) > 1:
                singles |= {run: (arm, curve(values)) for run, values in by_run.items() if len(values)}
        panels.append(Panel(f"{name}: {metric}", unit, lines, singles=singles))
    if average and len(names) > 1:
        lines = {}
        for arm, runs in arms.items():
            lines[arm] = mean_curve(transform(values) for values in pool_means(runs, names, extract))
        panels.append(Panel(f"mean of the pool: {metric}", unit, lines))
    return panels


def _unchanged(values: Series) -> Series:
    return values


def pool_means(runs: Sequence[LoggedRun], names: Sequence[str], extract: Extract) -> list[Series]:
    """Return the mean over the pool's policies of every run without a lost policy."""
    return [mean([extract(run, name) for name in names]) for run in runs if _no_policy_lost(run)]


def accuracy_panels(arms: Arms, *, average: bool) -> list[Panel]:
    """Return the validation accuracy of each policy and, with `average`, of the pool."""
    measure = measure_of(_all(arms))
    return panels_of(
        arms, f"validation {measure}", f"greedy {measure}", LoggedRun.accuracy_of, smoothed=False, average=average
    )


def accuracy_figure(arms: Arms, name: str, title: str) -> Figure:
    """Return a figure of the validation accuracy of each policy and of the pool."""
    return Figure(
        name,
        title,
        f"Greedy validation {measure_of(_all(arms))}; {spread(arms)}.",
        filled(*accuracy_panels(arms, average=True)),
        columns=_columns(arms),
    )


def _with_policy(runs: Sequence[LoggedRun], name: str) -> list[LoggedRun]:
    """Return the runs, except those that finished without the policy."""
    return [run for run in runs if run.state != RunState.FINISHED or run.policies[name].result is not None]


def _no_policy_lost(run: LoggedRun) -> bool:
    return run.state != RunState.FINISHED or all(policy.result is not None for policy in run.policies.values())


def spread(arms: Arms) -> str:
    """Return a caption for the lines: the values of one run, or a mean with a band."""
    if all(len(runs) == 1 for runs in arms.values()):
        return "one run per arm"
    return "mean over runs with a band of one standard deviation (n - 1)"


def _columns(arms: Arms) -> int:
    names = len(policy_names(arms))
    return names + 1 if 1 < names < 4 else max(1, min(names, 4))


def _probes(arms: Arms, slug: str, omitted: str) -> Figure:
    return Figure(
        f"{slug}-probes",
        "Which arm scored higher?",
        f"Greedy validation {measure_of(_all(arms))} and training reward (moving average) of each policy and of the "
        f"pool's mean; {spread(arms)}.{omitted}",
        filled(
            *accuracy_panels(arms, average=True),
            *panels_of(arms, "training reward", "mean reward", metric_of("reward"), smoothed=True, average=True),
        ),
        columns=_columns(arms),
    )


def _regularizers(arms: Arms, slug: str, omitted: str) -> Figure:
    panels: list[Panel] = []
    for metric, key in (("entropy", "entropy"), ("PPO KL", "ppo_kl"), ("KL loss", "kl")):
        panels += panels_of(arms, metric, "nats per token", metric_of(key), smoothed=True, average=False)
    return Figure(
        f"{slug}-regularizers",
        "Did training stay stable?",
        f"Entropy, PPO KL and KL to the initial model; moving averages, {spread(arms)}.{omitted}",
        filled(*panels),
        columns=max(1, len(policy_names(arms))),
    )


def _gates(arms: Arms, slug: str) -> Figure:
    return Figure(
        f"{slug}-gate",
        "When could another member help?",
        "The gate of a regime opens on a prompt where it has something to teach: the fraction of a round's prompts; "
        f"moving average, {spread(arms)}.",
        filled(
            *panels_of(
                arms,
                "gate rate",
                "fraction of prompts",
                lambda run, name: run.by_role(name, "gate_rate"),
                smoothed=True,
                average=False,
            )
        ),
        columns=max(1, min(len(policy_names(arms)), 3)),
    )


def _further(arms: Arms, shown: set[str], slug: str) -> Figure | None:
    """Return a figure of the arms that no other figure shows, with GRPO."""
    grpo = baseline().name
    remaining = {arm: runs for arm, runs in arms.items() if arm not in shown or arm == grpo}
    if not set(remaining) - {grpo}:
        return None
    return accuracy_figure(remaining, f"{slug}-further-arms", "How did the further arms do?")


def _evaluations(arms: Arms, slug: str) -> list[Figure]:
    """Return one figure of accuracy by task and policy for each evaluation setup with trained models."""
    by_setup: dict[str, dict[str, list[StoredEvaluation]]] = {}
    initial: dict[str, list[StoredEvaluation]] = {}
    for arm, runs in arms.items():
        for run in runs:
            for evaluation in run.evaluations:
                if evaluation.initial:
                    initial.setdefault(evaluation.how, []).append(evaluation)
                else:
                    by_setup.setdefault(evaluation.how, {}).setdefault(arm, []).append(evaluation)
    figures = []
    for number, (how, by_arm) in enumerate(by_setup.items(), 1):
        figures.append(_task_bars(by_arm, initial.get(how, [])[:1], arms, slug, number))
    return figures


def _task_bars(
    by_arm: Mapping[str, Sequence[StoredEvaluation]],
    initial: Sequence[StoredEvaluation],
    arms: Arms,
    slug: str,
    number: int,
) -> Figure:
    """Return the figure of one setup. `initial`: the models before training, which all arms share."""
    tasks = next(iter(by_arm.values()))[0].tasks
    evaluated = {BEFORE: initial, **by_arm} if initial else by_arm
    panels = []
    for name in policy_names(arms):
        bars = {}
        for arm, evaluations in evaluated.items():
            by_task: dict[str, list[float]] = {task: [] for task in tasks}
            for evaluation in evaluations:
                for task, accuracy in evaluation.accuracy.get(name, {}).items():
                    by_task[task].append(accuracy)
            bars[arm] = mean_bars(by_task)
        panels.append(Panel(f"{name}: accuracy by task", "accuracy", bars=bars))
    missing = [arm for arm in arms if arm not in by_arm]
    note = f" Without this evaluation: {', '.join(missing)}." if missing else ""
    if not initial:
        note += " For the models before training: mutualrl eval --run RUN --initial."
    return Figure(
        f"{slug}-tasks" if number == 1 else f"{slug}-tasks-{number}",
        "On which tasks?",
        f"Accuracy of the models by task (mutualrl eval); {spread(arms)}.{note}",
        filled(*panels),
        columns=1 if len(tasks) > 4 else max(1, min(len(panels), 2)),
    )


def _group_bars(arms: Arms, slug: str) -> Figure | None:
    """Return accuracy by group (for a mixture, by task) before training and after each arm."""
    names = policy_names(arms)
    finished: dict[str, list[LoggedRun]] = {}
    group_names: set[str] = set()
    for arm, runs in arms.items():
        for run in runs:
            if run.state == RunState.FINISHED:
                finished.setdefault(arm, []).append(run)
                group_names.update(*(run.groups(name) for name in names))
    groups = sorted(group_names)
    if not 1 < len(groups) <= 12 or not names:
        return None
    measure = measure_of(_all(arms))
    panels = []
    for name in names:
        first = next(iter(finished.values()))
        bars = {BEFORE: _group_means(groups, first, name, before=True)}
        bars |= {arm: _group_means(groups, runs, name, before=False) for arm, runs in finished.items()}
        panels.append(Panel(f"{name}: final {measure} by group", f"greedy {measure}", bars=bars))
    return Figure(
        f"{slug}-groups",
        "On which prompts?",
        f"Final greedy {measure} by group (for a mixture, by task); {spread(arms)}.",
        filled(*panels),
        columns=1 if len(groups) > 4 else max(1, min(len(names), 2)),
    )


def _group_means(groups: Sequence[str], runs: Sequence[LoggedRun], name: str, *, before: bool) -> Bars:
    by_group: dict[str, list[float]] = {group: [] for group in groups}
    for group in groups:
        for run in _with_policy(runs, name):
            measured = run.accuracy_of(name, group)
            chosen = measured[measured.index == 0] if before else measured.tail(1)
            by_group[group] += chosen.tolist()
    return mean_bars(by_group)
