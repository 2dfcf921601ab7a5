"""Figures for papers, drawn with matplotlib: PNG and SVG files on white, in the page's colours and dashes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutualrl.console.display import clean
from mutualrl.console.plots import draw_on, save
from mutualrl.reporting.figure_specs import Figure, Panel
from mutualrl.reporting.signs import Signs

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

INK, PAPER = "#222222", "#ffffff"
LONGEST = 64  # characters per label
_WIDTH, _HEIGHT = 4.2, 2.9  # per panel, in inches


CAPTIONS = "captions.md"


def draw_figures(figures: Sequence[Figure], directory: Path, signs: Signs) -> None:
    """Write each figure as NAME.png and NAME.svg, and the captions of all."""
    lines = []
    for figure in figures:
        draw_figure(figure, directory, signs)
        paper = f" In the paper: {figure.paper}." if figure.paper else ""
        lines.append(f"**{figure.name}** ({_label(figure.title)}) {clean(figure.caption, 2000)}{paper}\n\n")
    (directory / CAPTIONS).write_text("".join(lines), encoding="utf-8")


def draw_figure(figure: Figure, directory: Path, signs: Signs | None = None) -> None:
    """Write NAME.png and NAME.svg to a directory. `signs`: of its curves and bars; None: in their order."""
    signs = signs or Signs()
    rows = math.ceil(len(figure.panels) / figure.columns)
    columns = min(figure.columns, len(figure.panels))
    most_bars = max(max(map(len, panel.bars.values()), default=0) * len(panel.bars) for panel in figure.panels)
    width = max(_WIDTH, 1.5 + 0.22 * most_bars) if most_bars else _WIDTH
    with draw_on((width * columns + 0.4, _HEIGHT * rows + 0.5), STYLE | {"svg.hashsalt": figure.name}) as canvas:
        axes = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for axis, panel in zip(axes, figure.panels, strict=False):
            _panel(axis, panel, signs)
        for axis in axes[len(figure.panels) :]:
            axis.set_axis_off()
        _legend(canvas, axes[: len(figure.panels)])
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # lay out once, draw twice
        save(canvas, directory, figure.name)


STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # keep text as text: searchable and small
    "text.parse_math": False,  # names may contain dollar signs
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


def _label(text: str) -> str:
    shown = clean(text, 200).replace("\n", " ")
    shown = (
        f" {shown}" if shown.startswith("_") else shown
    )  # matplotlib omits labels with a leading underscore from legends
    half = LONGEST // 2
    return shown if len(shown) <= LONGEST else f"{shown[: half - 1]}…{shown[-half:]}"


def _panel(axis: Axes, panel: Panel, signs: Signs) -> None:
    axis.set_title(_label(panel.title))
    axis.set_ylabel(_label(panel.y))
    for label, curve in panel.lines.items():
        colour, dash = signs.colour(label), signs.dash(label)
        marker = "o" if len(curve) <= 12 else None
        axis.plot(
            curve.index,
            curve["value"],
            color=colour,
            linestyle=(0, dash) if dash else "-",
            marker=marker,
            markersize=3,
            label=_label(label),
        )
        if "low" in curve:
            axis.fill_between(curve.index, curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
    if panel.lines:
        axis.set_xlabel(panel.x)
    if panel.bars:
        _bars(axis, panel, signs)
    axis.grid(axis="y", alpha=0.25, linewidth=0.5, color="#888888")


def _bars(axis: Axes, panel: Panel, signs: Signs) -> None:
    categories = list(dict.fromkeys(category for bars in panel.bars.values() for category in bars.index))
    width = 0.8 / len(panel.bars)
    for place, (label, bars) in enumerate(panel.bars.items()):
        shift = (place - (len(panel.bars) - 1) / 2) * width
        axis.bar(
            [categories.index(category) + shift for category in bars.index],
            bars["value"],
            width * 0.92,
            yerr=bars["error"].fillna(0.0) if bars["error"].any() else None,
            label=_label(label),
            color=signs.colour(label),
            error_kw={"ecolor": INK, "elinewidth": 0.8},
            hatch=signs.hatch(label),
            edgecolor=PAPER,
            linewidth=0.3,
        )
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_xticks(range(len(categories)), [_label(c) for c in categories])
    if len(categories) > 4:
        axis.tick_params(axis="x", rotation=25)


def _legend(canvas: matplotlib.figure.Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below all panels if they have the same labels, else one per panel."""
    entries = [axis.get_legend_handles_labels() for axis in axes]
    if len({tuple(labels) for _, labels in entries}) == 1:
        handles, labels = entries[0]
        canvas.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))
        return
    for axis, (_, labels) in zip(axes, entries, strict=True):
        if labels:
            axis.legend(fontsize=8)
