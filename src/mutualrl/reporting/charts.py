"""Charts of the page: what its script draws, as numbers. Limits of axes, thinning and rounding are decided here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.reporting.report_tables import Table
from mutualrl.reporting.signs import Signs, shown
from mutualrl.runs.curves import Bars, Curve, keeping_extremes
from mutualrl.runs.logs import Series
from mutualrl.storage.files import JsonObject

Values: TypeAlias = npt.NDArray[np.float64]

DIGITS = 5  # significant, of a number that is not whole, or of its panel's span where that is smaller
FEW = 8  # values, below which none is an outlier
SPIKE = 4.0  # spans of the inner eight tenths of the values, beyond which a value does not stretch the axis
MARGIN = 0.05  # of the span, free above and below


def chart(figure: Figure, signs: Signs, most: int | None = None, *, singles: bool = True) -> JsonObject:
    """Return a figure as the page's script draws it. `most`: points per curve, which keep minima and maxima; None: all.
    `singles`: with the curves of single runs."""
    return {"columns": figure.columns, "panels": [_panel(panel, signs, most, singles) for panel in figure.panels]}


def _panel(panel: Panel, signs: Signs, most: int | None, singles: bool) -> JsonObject:
    for label in (*panel.lines, *panel.bars):
        signs.colour(label)  # in order of first use
    curves = list(panel.lines.values())
    if singles:
        curves += [curve for _, curve in panel.singles.values()]
    digits = needed_digits(curves)
    lines = [{"label": shown(label), **_line(curve, most, digits)} for label, curve in panel.lines.items()]
    drawn: JsonObject = {"title": shown(panel.title), "y": shown(panel.y), "x": panel.x, "lines": lines}
    if singles and panel.singles:
        drawn["singles"] = []
        for run, (arm, curve) in panel.singles.items():
            drawn["singles"].append({"run": shown(run), "label": shown(arm), **_line(curve, most, digits)})
    if panel.lines:
        drawn["limits"] = limits(curves, whole="accuracy" in panel.y or "fraction" in panel.y)
    if panel.bars:
        drawn["bars"] = [{"label": shown(label), **_bars(bars)} for label, bars in panel.bars.items()]
    return drawn


#: of an axis of fractions
LEAST_SPAN = 0.2


def limits(curves: Sequence[Curve], *, whole: bool = False) -> tuple[float, float]:
    """Return the lower and the upper limit of an axis.

    With q(p) the quantiles of the curves' values and S = q(.9) - q(.1), a value above q(.9) + SPIKE * S or below q(.1)
    - SPIKE * S does not stretch the axis if its curve comes back: it is drawn at the edge. A curve that ends there
    does, and so does every fraction (`whole`). The span has a margin of MARGIN on either side; an axis of values that
    are not negative does not begin below 0, one of fractions does not end above 1 and has a span of LEAST_SPAN or more,
    in which one of a few problems is no fall. Raises ValueError without any value.
    """
    values = _finite(curves)
    if not len(values):
        raise ValueError("an axis of no values; expected at least one")
    low, high = float(values.min()), float(values.max())
    inner = _finite([curve[["value"]] for curve in curves])
    if len(inner) >= FEW and not whole:
        q10, q90 = np.quantile(inner, (0.1, 0.9))
        reach = SPIKE * float(q90 - q10)
        if reach > 0:
            typical = [_without_spikes(curve, float(q10) - reach, float(q90) + reach) for curve in curves]
            low, high = min(each.min() for each in typical), max(each.max() for each in typical)
    margin = MARGIN * (high - low) or 0.5 * abs(high) or 0.5
    bottom, top = low - margin, high + margin
    if whole and low >= 0 and high <= 1 and (missing := LEAST_SPAN - (top - bottom)) > 0:
        bottom = min(max(0.0, bottom - missing / 2), 1.0 - LEAST_SPAN)
        top = bottom + LEAST_SPAN
    if low >= 0:
        bottom = max(0.0, bottom)
    if whole and high <= 1:
        top = min(1.0, top) if high < 1 else 1.0 + MARGIN
    return _number(bottom, 12), _number(top, 12)


def _without_spikes(curve: Curve, lowest: float, highest: float) -> Values:
    """Return the values of a curve, with its band, at the steps where they are within two bounds, and at those after
    the last such step; the band does not reach further than these values and the bounds."""
    values = curve["value"].to_numpy(dtype="float64")
    within = np.flatnonzero((values >= lowest) & (values <= highest))
    last = within[-1] if len(within) else -1
    rows = np.union1d(within, np.arange(last + 1, len(values)))
    low, high = values[rows].min(), values[rows].max()
    return np.clip(_finite([curve.iloc[rows]]), min(lowest, low), max(highest, high))


def _finite(curves: Sequence[Curve]) -> Values:
    values = np.concatenate([curve.to_numpy(dtype="float64").ravel() for curve in curves] or [np.empty(0)])
    finite: Values = values[np.isfinite(values)]
    return finite


def needed_digits(curves: Sequence[Curve]) -> int:
    """Return the significant digits that show DIGITS of the span of curves: more where their values differ little."""
    values = _finite(curves)
    span = float(values.max() - values.min()) if len(values) else 0.0
    largest = float(np.abs(values).max()) if len(values) else 0.0
    return min(15, DIGITS + (max(0, math.floor(math.log10(largest / span))) if span > 0 else 0))


def constants(figures: Sequence[Figure]) -> tuple[list[Figure], Table]:
    """Return the figures without panels in which every curve has one value throughout, and a table of these values."""
    moving, rows = [], []
    for figure in figures:
        panels = []
        for panel in figure.panels:
            if panel.bars or not panel.lines or not all(map(is_constant, panel.lines.values())):
                panels.append(panel)
                continue
            for label, curve in panel.lines.items():
                first, last = curve.index[0], curve.index[-1]
                where = f"{first}" if first == last else f"{first} to {last}"
                rows.append([panel.title, label, f"{curve['value'].iloc[0]:.5g}", panel.y, where])
        if panels:
            moving.append(replace(figure, panels=tuple(panels)))
    return moving, Table("Constant throughout", ("metric", "of", "value", "unit", "steps"), rows)


def is_constant(curve: Curve) -> bool:
    """Return whether a curve has one value throughout, and no band."""
    flat = bool((curve["value"] == curve["value"].iloc[0]).all())
    return flat and ("high" not in curve or bool((curve["high"] == curve["value"]).all()))


def _line(curve: Curve, most: int | None, digits: int) -> JsonObject:
    drawn = curve if most is None else keeping_extremes(curve, most)
    names = {"value": "y", "low": "low", "high": "high"}
    columns = {names[str(name)]: _numbers(values, digits) for name, values in drawn.items() if str(name) in names}
    return {"x": _steps(drawn.index.tolist()), **columns}


def _steps(steps: Sequence[float]) -> object:
    """Return steps as a list, or as [first, last] in an object where each follows the one before."""
    if len(steps) > 3 and steps == list(range(int(steps[0]), int(steps[0]) + len(steps))):
        return {"from": steps[0], "to": steps[-1]}
    return steps


def _bars(bars: Bars) -> Mapping[str, object]:
    return {
        "categories": [shown(str(category)) for category in bars.index],
        "values": _numbers(bars["value"], DIGITS),
        "errors": _numbers(bars["error"], DIGITS),
    }


def _numbers(values: Series, digits: int) -> list[float | None]:
    return [None if math.isnan(value) else _number(value, digits) for value in values.tolist()]


def _number(value: float, digits: int) -> float:
    """Return a whole number as it is, another to so many significant digits."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.{digits}g}")
