"""Figures as data: what is in each panel. Drawing them, and telling them as tables, are other modules' work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mutualrl.reporting.run_reader import Point
from mutualrl.reporting.series import Curve, over_runs, smoothed, window_of

MOST_POINTS = 2000  # of a curve: more than a drawing shows


@dataclass(frozen=True, slots=True)
class Line:
    """Curve; `low` and `high` bound a band around it, where there is one."""

    label: str
    x: tuple[int, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per category; `errors` are half the length of its error bar, None where there is none."""

    label: str
    categories: tuple[str, ...]
    values: tuple[float, ...]
    errors: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: lines, or bars."""

    title: str
    y: str
    lines: tuple[Line, ...] = ()
    bars: tuple[Bars, ...] = ()
    x: str = "optimizer step"


@dataclass(frozen=True, slots=True)
class Figure:
    """`name` is its file's; `paper` is the figure of the paper that it repeats with our data, if there is one."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 2
    paper: str = ""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """Return everything that is drawn, as plain values."""
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
    """Return a curve through points; of very many, MOST_POINTS evenly spaced ones and the last."""
    if len(points) > MOST_POINTS:
        places = [place * (len(points) - 1) // (MOST_POINTS - 1) for place in range(MOST_POINTS)]
        points = [points[place] for place in places]
    return Line(label, tuple(p.step for p in points), tuple(p.value for p in points))


def smooth_line(label: str, points: Sequence[Point]) -> Line:
    """Return a curve through the moving mean of points."""
    return line(label, smoothed(points, window_of(len(points))))


def banded(label: str, curve: Curve) -> Line:
    """Return a mean over runs with its spread around it; without a band where there is one run."""
    if curve.runs < 2:
        return Line(label, curve.steps, curve.mean)
    low = tuple(mean - spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
    high = tuple(mean + spread for mean, spread in zip(curve.mean, curve.spread, strict=True))
    return Line(label, curve.steps, curve.mean, low, high)


def over(label: str, series: Sequence[Sequence[Point]], *, smooth: bool = False) -> Line:
    """Return mean and spread over runs, each smoothed first if asked for."""
    shown = [smoothed(points, window_of(len(points))) for points in series] if smooth else series
    return banded(label, over_runs(shown))


def filled(*panels: Panel) -> tuple[Panel, ...]:
    """Return the panels that have something in them, with the lines that have points."""
    nonempty = []
    for panel in panels:
        lines = tuple(each for each in panel.lines if each.x)
        bars = tuple(each for each in panel.bars if each.categories)
        if lines or bars:
            nonempty.append(Panel(panel.title, panel.y, lines, bars, panel.x))
    return tuple(nonempty)
