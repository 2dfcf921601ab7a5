"""Curves over steps and seeds: what is computed from the frames of runs, and what a figure draws.

A curve is a frame by step with the column `value`, and `low` and `high` where it has a band; bars are a frame by
category with the columns `value` and `error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import pandas as pd

from mutualrl.regimes import baseline
from mutualrl.runs.logs import LoggedRun, Series
from mutualrl.runs.record import Run
from mutualrl.storage.metrics import WAIT

Curve: TypeAlias = pd.DataFrame
Bars: TypeAlias = pd.DataFrame

R = TypeVar("R", bound=Run)

MOST_POINTS = 2000  # per curve: more than a drawing can show


def series(values: Mapping[int, float]) -> Series:
    """Return values by step."""
    return pd.Series(values, dtype="float64").sort_index()


def last(values: Series) -> float:
    """Return the last value; 0 if there is none."""
    return float(values.iloc[-1]) if len(values) else 0.0


def curve(values: Series) -> Curve:
    """Return a curve without a band, of at most MOST_POINTS points (`keeping_extremes`)."""
    return keeping_extremes(values.to_frame("value"), MOST_POINTS)


def smooth(values: Series) -> Series:
    """Return the centred moving average over a twentieth of the points, truncated at the ends."""
    return values.rolling(window_of(len(values)), center=True, min_periods=1).mean()


def window_of(length: int) -> int:
    """Return the moving-average window for a noisy curve of `length` steps: a twentieth, odd."""
    return max(1, length // 20) | 1


def smooth_curve(values: Series) -> Curve:
    """Return the moving average of values as a curve."""
    return curve(smooth(values))


def mean_curve(runs: Iterable[Series]) -> Curve:
    """Return the mean over runs at the steps that every non-empty one has, with a band of one standard deviation
    (n - 1); no band for one run."""
    table = side_by_side(runs)
    drawn = table.mean(axis=1).to_frame("value")
    if table.shape[1] > 1:
        spread = table.std(axis=1)
        drawn = drawn.assign(low=drawn["value"] - spread, high=drawn["value"] + spread)
    return keeping_extremes(drawn, MOST_POINTS)


def mean(several: Sequence[Series]) -> Series:
    """Return the mean of several series at their common steps, e.g. of a pool; empty if one of them is."""
    if not several or any(each.empty for each in several):
        return series({})
    return side_by_side(several).mean(axis=1)


def side_by_side(several: Iterable[Series]) -> pd.DataFrame:
    """Return a column per non-empty series, at the steps that all of them have."""
    columns = [each for each in several if not each.empty]
    return pd.concat(columns, axis=1, join="inner") if columns else pd.DataFrame()


def mean_bars(values: Mapping[str, Sequence[float]]) -> Bars:
    """Return the mean of each category with values, and the standard deviation (n - 1) of several: NaN for one."""
    columns = {category: pd.Series(each, dtype="float64") for category, each in values.items() if len(each)}
    means = {category: each.mean() for category, each in columns.items()}
    errors = {category: each.std() for category, each in columns.items()}
    return pd.DataFrame({"value": means, "error": errors}, index=list(columns), dtype="float64")


def first_reaching(values: Series, target: float) -> int | None:
    """Return the first step at which a curve is at or above `target`; None if there is none."""
    reached = values.index[values >= target]
    return int(reached[0]) if len(reached) else None


def tokens_per_second(run: LoggedRun, policy: str, *, without_validation: bool = False) -> Series:
    """Return the prompt and completion tokens of each round divided by the `step_time` of its optimizer steps, at the
    round's first step. The time includes generation and waiting, not validation. TRL logs a running token count at
    generation steps; a round's count is its difference. A round with a missing step is left out, and so is the next
    one, whose count may be that of two."""
    totals, times = run.series(policy, "num_tokens"), run.series(policy, "step_time")
    times = times[times > 0]
    validated = run.accuracy_of(policy).drop([0, run.steps[policy]], errors="ignore")  # not during a step
    starts = [int(step) for step in totals.index]
    ends = [step - 1 for step in [*starts, run.steps[policy] + 1]][1:]
    speeds, previous, complete = {}, 0.0, bool(starts) and starts[0] == 1
    for start, end in zip(starts, ends, strict=True):
        seconds, tokens = times.loc[start:end], totals[start] - previous
        previous, follows, complete = totals[start], complete, len(seconds) == end - start + 1
        if follows and complete and not (without_validation and len(validated.loc[start:end])):
            speeds[start] = tokens / seconds.sum()
    return series(speeds)


def busy_seconds(run: LoggedRun, policy: str) -> list[float]:
    """Return the busy seconds of each round of a policy: the `step_time` of its optimizer steps (with generation,
    without validation) minus the wait. Empty if a step has no time."""
    seconds, waits = run.series(policy, "step_time"), run.series(policy, WAIT.key)
    if len(seconds) < run.steps[policy] or waits.empty:
        return []
    busy = (seconds - waits.reindex(seconds.index, fill_value=0.0)).loc[waits.index[0] :]
    return busy.groupby(waits.index.searchsorted(busy.index, side="right")).sum().tolist()


def by_arm(runs: Sequence[R]) -> dict[str, list[R]]:
    """Return the runs grouped by regime and settings, plain GRPO first."""
    arms: dict[str, list[R]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return dict(sorted(arms.items(), key=lambda item: (item[0] != baseline().name, item[0])))


def policies_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the policies that every run has, in the first run's order."""
    shared: set[str] = set.intersection(*(set(run.policies) for run in runs)) if runs else set()
    return [name for name in runs[0].policies if name in shared] if runs else []


def keeping_extremes(values: Curve, most: int) -> Curve:
    """Return a curve of at most `most` points (4 or more), with the first, the last, and the smallest and the largest
    value of each of equal spans of its points between them."""
    if len(values) <= most:
        return values
    places = {0, len(values) - 1}
    inner = values["value"].iloc[1:-1].to_numpy()
    for span in np.array_split(np.arange(len(inner)), (most - 2) // 2):
        places |= {1 + int(span[inner[span].argmin()]), 1 + int(span[inner[span].argmax()])}
    return values.iloc[sorted(places)]
