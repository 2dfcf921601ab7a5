"""Curves over steps and over seeds, as pure functions of points."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mutualrl.reporting.reading import Point, Policy, Run, number


@dataclass(frozen=True, slots=True)
class Curve:
    """A mean over runs at each step, and its spread: the sample deviation (n - 1) over the runs, 0 of a single one.
    All of the same length; `runs` of them went in."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    runs: int

    @property
    def points(self) -> list[Point]:
        """The means by step."""
        return [Point(*pair) for pair in zip(self.steps, self.mean, strict=True)]


def over_runs(series: Sequence[Sequence[Point]]) -> Curve:
    """Mean and spread at the steps that every series has. Empty series are left out."""
    tables = [dict(points) for points in series if points]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    columns = [[table[step] for table in tables] for step in steps]
    return Curve(
        tuple(steps),
        tuple(statistics.fmean(column) for column in columns),
        tuple(deviation(column) for column in columns),
        len(tables),
    )


def deviation(values: Sequence[float]) -> float:
    """Sample deviation (n - 1); 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mean_of(series: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of several series at the steps that all of them have: a pool's average over its policies."""
    return over_runs(series).points if series and all(series) else []


def window_of(length: int) -> int:
    """How many steps a curve of that length is averaged over where single steps are noise: a twentieth, odd."""
    return max(1, length // 20) | 1


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Centred moving mean over `window` points (odd); at the ends over those that are there."""
    half = window // 2
    values = [point.value for point in points]
    return [
        Point(point.step, statistics.fmean(values[max(0, i - half) : i + half + 1])) for i, point in enumerate(points)
    ]


def cumulative(points: Sequence[Point]) -> list[Point]:
    """Running sum."""
    total, found = 0.0, []
    for step, value in points:
        total += value
        found.append(Point(step, total))
    return found


def tokens_per_second(policy: Policy, *, without_validation: bool = False) -> list[Point]:
    """Tokens of prompts and completions of a step over its `step_time`, generation and waiting included. The count is
    TRL's running one, which a step's own is the difference of; validation is outside the time."""
    found, before = [], 0.0
    for row in policy.metrics:
        total, seconds = number(row.get("num_tokens")), number(row.get("step_time"))
        if total is None:
            continue
        if seconds and total > before and not (without_validation and "validation" in row):
            found.append(Point(row["step"], (total - before) / seconds))
        before = total
    return found


def first_reaching(points: Sequence[Point], target: float) -> int | None:
    """The first step at which a curve is at or above `target`; None when it never is."""
    return next((step for step, value in points if value >= target), None)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of the same regime and settings, plain GRPO first."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return dict(sorted(arms.items(), key=lambda item: (item[0] != "grpo", item[0])))


def policies_of(runs: Sequence[Run]) -> list[str]:
    """Names of the policies that every run has, in the first one's order."""
    shared: set[str] = set.intersection(*(set(run.policies) for run in runs)) if runs else set()
    return [name for name in runs[0].policies if name in shared] if runs else []


def summary_figures(runs: Sequence[Run]) -> Mapping[str, list[tuple[float, float]]]:
    """Of each policy the accuracy before and after, run by run, of the runs that ended."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for name, policy in run.policies.items():
            curve = policy.accuracy()
            if policy.result is not None and curve and curve[0].step == 0:
                found.setdefault(name, []).append((curve[0].value, curve[-1].value))
    return found
