"""Curves over steps and seeds, as pure functions of points."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutualrl.regimes import baseline
from mutualrl.reporting.run_reader import Point, PolicyRun, Run
from mutualrl.storage.files import finite_number


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean over `runs` runs at each step, and its spread: the standard deviation (n - 1) over runs, 0 for one run. All
    tuples have the same length."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    runs: int

    @property
    def points(self) -> list[Point]:
        """Return the means by step."""
        return [Point(*pair) for pair in zip(self.steps, self.mean, strict=True)]


def over_runs(series: Sequence[Sequence[Point]]) -> Curve:
    """Return mean and spread at the steps that every non-empty series has."""
    tables = [dict(points) for points in series if points]
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    columns = [[table[step] for table in tables] for step in steps]
    return Curve(
        tuple(steps),
        tuple(statistics.fmean(column) for column in columns),
        tuple(standard_deviation(column) for column in columns),
        len(tables),
    )


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation (n - 1); 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def mean_of(series: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean of several series at their common steps, e.g. a pool's average over its policies."""
    return over_runs(series).points if series and all(series) else []


def window_of(length: int) -> int:
    """Return the moving-average window for a noisy curve of `length` steps: a twentieth, odd."""
    return max(1, length // 20) | 1


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Return the centred moving average over `window` points (odd), truncated at the ends."""
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum([point.value for point in points], dtype=np.float64)])
    first = np.maximum(np.arange(len(points)) - half, 0)
    last = np.minimum(np.arange(len(points)) + half + 1, len(points))
    means = (sums[last] - sums[first]) / (last - first)
    return [Point(point.step, float(mean)) for point, mean in zip(points, means, strict=True)]


def cumulative(points: Sequence[Point]) -> list[Point]:
    """Return the running sum."""
    total, sums = 0.0, []
    for step, value in points:
        total += value
        sums.append(Point(step, total))
    return sums


def tokens_per_second(policy: PolicyRun, *, without_validation: bool = False) -> list[Point]:
    """Return the prompt and completion tokens of each round divided by the `step_time` of its optimizer steps, at the
    round's first step. The time includes generation and waiting, not validation. TRL logs a running token count at
    generation steps; a round's count is its difference. Rounds with a missing step are left out."""
    points: list[Point] = []
    rounds: list[list[dict[str, Any]]] = []
    for row in policy.metrics:
        if finite_number(row.get("num_tokens")) is not None:
            rounds.append([])
        if rounds:
            rounds[-1].append(row)
    previous_total, expected = 0.0, 1
    for rows in rounds:
        steps, total = [row["step"] for row in rows], float(rows[0]["num_tokens"])
        seconds = [finite_number(row.get("step_time")) or 0.0 for row in rows]
        complete = steps == list(range(expected, expected + len(steps)))
        if complete and all(seconds) and not (without_validation and any("validation" in row for row in rows)):
            points.append(Point(steps[0], (total - previous_total) / sum(seconds)))
        previous_total, expected = total, steps[-1] + 1
    return points


def first_reaching(points: Sequence[Point], target: float) -> int | None:
    """Return the first step at which a curve is at or above `target`; None if there is none."""
    return next((step for step, value in points if value >= target), None)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs grouped by regime and settings, plain GRPO first."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return dict(sorted(arms.items(), key=lambda item: (item[0] != baseline().name, item[0])))


def policies_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the policies that every run has, in the first run's order."""
    shared: set[str] = set.intersection(*(set(run.policies) for run in runs)) if runs else set()
    return [name for name in runs[0].policies if name in shared] if runs else []
