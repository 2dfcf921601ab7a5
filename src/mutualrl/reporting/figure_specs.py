"""Figures as data: the content of each panel. Other modules draw them and write them as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mutualrl.reporting.run_reader import Point
from mutualrl.reporting.series import Curve, over_runs, smoothed, window_of

MOST_POINTS = 2000  # per curve: more than a drawing can show


@dataclass(frozen=True, slots=True)
class Line:
    """Curve; `low` and `high` bound its band, if any."""

    label: str
    x: tuple[int, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per category; `errors` are half-lengths of the error bars, None for no error bar."""

    label: str
    categories: tuple[str, ...]
    values: tuple[float, ...]
    errors: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes with lines or bars."""

    title: str
    y: str
    lines: tuple[Line, ...] = ()
    bars: tuple[Bars, ...] = ()
    x: str = "optimizer step"


@dataclass(frozen=True, slots=True)
class Figure:
    """Figure. `name`: file name; `paper`: title of the corresponding figure in the paper, if any."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 2
    paper: str = ""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """Return all plotted values, as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "panels": [
                {
                    "title": panel.title,
                    "y": panel.y,
                    "lines": [
                        {"label": line.label, "x": list(line.x), "y": list(line.y)}
                        | ({"low": list(line.low), "high": list(line.high)} if line.low else {})
                        for line in panel.lines
                    ],
                    "bars": [
                        {
                            "label": bars.label,
                            "categories": list(bars.categories),
                            "values": list(bars.values),
                            "errors": list(bars.errors),
                        }
                        for bars in panel.bars
                    ],
                }
                for panel in self.panels
            ],
        }


def line(label: str, points: Sequence[Point]) -> Line:
    """Return a curve through points, thinned out to at most MOST_POINTS evenly spaced ones, the last included."""
    if len(points) > MOST_POINTS:
        indices = [i * (len(points) - 1) // (MOST_POINTS - 1) for i in range(MOST_POINTS)]
        points = [points[index] for index in indices]
    return Line(label, tuple(p.step for p in points), tuple(p.value for p in points))


def smooth_line(label: str, points: Sequence[Point]) -> Line:
    """Return the moving average of points."""
    return line(label, smoothed(points, window_of(len(points))))


def banded(label: str, curve: Curve) -> Line:
    """Return a mean over runs with a band of its spread; no band for one run."""
    if curve.runs < 2:
        return Line(label, curve.steps, curve.mean)
    low = tuple(mean - spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
    high = tuple(mean + spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
    return Line(label, curve.steps, curve.mean, low, high)


def over(label: str, series: Sequence[Sequence[Point]], *, smooth: bool = False) -> Line:
    """Return mean and spread over runs, optionally smoothing each run first."""
    curves = [smoothed(points, window_of(len(points))) for points in series] if smooth else series
    return banded(label, over_runs(curves))


def filled(*panels: Panel) -> tuple[Panel, ...]:
    """Return the non-empty panels, with their non-empty lines and bars."""
    nonempty = []
    for panel in panels:
        lines = tuple(curve for curve in panel.lines if curve.x)
        bars = tuple(group for group in panel.bars if group.categories)
        if lines or bars:
            nonempty.append(Panel(panel.title, panel.y, lines, bars, panel.x))
    return tuple(nonempty)
