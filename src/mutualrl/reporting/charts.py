"""Charts of the page: what its script draws, as numbers. Limits of axes, thinning and rounding are decided here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from mutualrl.console.display import clean
from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.reporting.report_tables import Table
from mutualrl.reporting.signs import Signs
from mutualrl.runs.curves import Bars, Curve, keeping_extremes

DIGITS = 5  # significant, of a number that is not whole
LONGEST = 120  # characters per label
FEW = 8  # values, below which none is an outlier
SPIKE = 4.0  # spans of the inner nine tenths of the values, beyond which a value does not stretch the axis
MARGIN = 0.05  # of the span, free above and below


def chart(figure: Figure, signs: Signs, most: int | None = None, *, singles: bool = True) -> dict[str, Any]:
    """Return a figure as the page's script draws it. `most`: points per curve, which keep minima and maxima; None: all.
    `singles`: with the curves of single runs."""
    return {"columns": figure.columns, "panels": [_panel(panel, signs, most, singles) for panel in figure.panels]}


def _panel(panel: Panel, signs: Signs, most: int | None, singles: bool) -> dict[str, Any]:
    lines = [{"label": _label(label), **_line(curve, most)} for label, curve in panel.lines.items()]
    for label in (*panel.lines, *panel.bars):
        signs.colour(_label(label))  # in order of first use
    drawn: dict[str, Any] = {"title": _label(panel.title), "y": _label(panel.y), "x": panel.x, "lines": lines}
    curves = list(panel.lines.values())
    if singles and panel.singles:
        drawn["singles"] = []
        for run, (arm, curve) in panel.singles.items():
            drawn["singles"].append({"run": _label(run), "label": _label(arm), **_line(curve, most)})
            curves.append(curve)
    if panel.lines:
        drawn["limits"] = limits(curves, whole="accuracy" in panel.y or "fraction" in panel.y)
    if panel.bars:
        drawn["bars"] = [{"label": _label(label), **_bars(bars)} for label, bars in panel.bars.items()]
    return drawn


def limits(curves: Sequence[Curve], *, whole: bool = False) -> tuple[float, float]:
    """Return the lower and the upper limit of an axis.

    With q(p) the quantiles of the curves' values and S = q(.95) - q(.05), a value above q(.95) + SPIKE * S or below
    q(.05) - SPIKE * S does not stretch the axis: it is drawn at its edge. The span has a margin of MARGIN on either
    side; an axis of values that are not negative does not begin below 0, one of fractions (`whole`) does not end above
    1. Raises ValueError without any value.
    """
    values = np.concatenate([curve.to_numpy(dtype="float64").ravel() for curve in curves] or [np.empty(0)])
    values = values[np.isfinite(values)]
    if not len(values):
        raise ValueError("an axis of no values; expected at least one")
    low, high = float(values.min()), float(values.max())
    if len(values) >= FEW:
        inner = np.concatenate([curve["value"].to_numpy(dtype="float64") for curve in curves])
        q05, q95 = np.quantile(inner[np.isfinite(inner)], (0.05, 0.95))
        reach = SPIKE * float(q95 - q05)
        if reach > 0:
            kept = values[(values >= q05 - reach) & (values <= q95 + reach)]
            low, high = float(kept.min()), float(kept.max())
    margin = MARGIN * (high - low) or 0.5 * abs(high) or 0.5
    bottom, top = low - margin, high + margin
    if low >= 0:
        bottom = max(0.0, bottom)
    if whole and high <= 1:
        top = min(1.0, top) if high < 1 else 1.0 + MARGIN
    return _number(bottom), _number(top)


def constants(figures: Sequence[Figure]) -> tuple[list[Figure], Table]:
    """Return the figures without panels in which every curve has one value throughout, and a table of these values."""
    kept, rows = [], []
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
            kept.append(replace(figure, panels=tuple(panels)))
    return kept, Table("Constant throughout", ("metric", "of", "value", "unit", "steps"), rows)


def is_constant(curve: Curve) -> bool:
    """Return whether a curve has one value throughout, and no band."""
    flat = bool((curve["value"] == curve["value"].iloc[0]).all())
    return flat and ("high" not in curve or bool((curve["high"] == curve["value"]).all()))


def _line(curve: Curve, most: int | None) -> dict[str, Any]:
    drawn = curve if most is None else keeping_extremes(curve, most)
    names = {"value": "y", "low": "low", "high": "high"}
    columns = {names[str(name)]: _numbers(values) for name, values in drawn.items() if str(name) in names}
    return {"x": _steps(drawn.index.tolist()), **columns}


def _steps(steps: Sequence[float]) -> object:
    """Return steps as a list, or as [first, last] in an object where each follows the one before."""
    if len(steps) > 3 and steps == list(range(int(steps[0]), int(steps[0]) + len(steps))):
        return {"from": steps[0], "to": steps[-1]}
    return steps


def _bars(bars: Bars) -> Mapping[str, object]:
    return {
        "categories": [_label(str(category)) for category in bars.index],
        "values": _numbers(bars["value"]),
        "errors": _numbers(bars["error"]),
    }


def _numbers(values: pd.Series[Any]) -> list[float | None]:
    return [None if math.isnan(value) else _number(value) for value in values.tolist()]


def _number(value: float) -> float:
    """Return a whole number as it is, another to DIGITS significant digits."""
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.{DIGITS}g}")


def _label(text: str) -> str:
    return clean(text, LONGEST).replace("\n", " ")
