"""Figures as data: the content of each panel. Other modules draw them and write them as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mutualrl.runs.curves import Bars, Curve


@dataclass(frozen=True, eq=False)
class Panel:
    """One pair of axes with curves or bars, by label. `singles`: curves of single runs, by run, with the label of their
    mean."""

    title: str
    y: str
    lines: Mapping[str, Curve] = field(default_factory=dict)
    bars: Mapping[str, Bars] = field(default_factory=dict)
    x: str = "optimizer step"
    singles: Mapping[str, tuple[str, Curve]] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return all plotted values, as plain values."""
        return {
            "title": self.title,
            "y": self.y,
            "lines": [_line(label, curve) for label, curve in self.lines.items()],
            "bars": [_bars(label, bars) for label, bars in self.bars.items()],
            "runs": [{"run": run, **_line(label, curve)} for run, (label, curve) in self.singles.items()],
        }


@dataclass(frozen=True, eq=False)
class Figure:
    """Figure. `name`: file name; `title`: the question that it answers; `paper`: title of the paper's figure that it
    corresponds to, if any."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    columns: int = 2
    paper: str = ""

    def to_json(self) -> dict[str, object]:
        """Return all plotted values, as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "panels": [panel.to_json() for panel in self.panels],
        }


def _line(label: str, curve: Curve) -> dict[str, object]:
    names = {"value": "y", "low": "low", "high": "high"}
    columns = {names[str(column)]: values.tolist() for column, values in curve.items()}
    return {"label": label, "x": curve.index.tolist(), **columns}


def _bars(label: str, bars: Bars) -> dict[str, object]:
    errors = [None if missing else error for error, missing in zip(bars["error"], bars["error"].isna(), strict=True)]
    return {"label": label, "categories": bars.index.tolist(), "values": bars["value"].tolist(), "errors": errors}


def filled(*panels: Panel) -> tuple[Panel, ...]:
    """Return the non-empty panels, with their non-empty curves and bars."""
    nonempty = []
    for panel in panels:
        lines = {label: curve for label, curve in panel.lines.items() if len(curve)}
        bars = {label: each for label, each in panel.bars.items() if len(each)}
        if lines or bars:
            nonempty.append(replace(panel, lines=lines, bars=bars))
    return tuple(nonempty)
