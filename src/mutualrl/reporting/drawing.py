"""Figures drawn with matplotlib: PNG and SVG files, and an inline SVG in the page's colours.

Lines differ in colour and dash pattern; the colours have enough contrast on white and on black.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutualrl.console.display import clean
from mutualrl.console.plots import draw_on, save
from mutualrl.reporting.figure_specs import Figure, Panel

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

COLOURS = ("#2f7fc1", "#d1711f", "#2a9d6f", "#a25fb8", "#c8454f", "#8a7a1f", "#3f9fb5", "#8c8c8c", "#b0607f", "#6f7fd0")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2, 2, 2)))
HATCHES = ("", "//", "..", "xx", "\\\\")
INK, PAPER = "#222222", "#ffffff"  # replaced by the page's colours when inlined
LONGEST = 64  # characters per label
_WIDTH, _HEIGHT = 4.2, 2.9  # per panel, in inches


def draw_figure(figure: Figure, directory: Path) -> str:
    """Write NAME.png and NAME.svg to a directory; return the SVG for the page."""
    rows = math.ceil(len(figure.panels) / figure.columns)
    columns = min(figure.columns, len(figure.panels))
    most_bars = max(max(map(len, panel.bars.values()), default=0) * len(panel.bars) for panel in figure.panels)
    width = max(_WIDTH, 1.5 + 0.22 * most_bars) if most_bars else _WIDTH
    with draw_on((width * columns + 0.4, _HEIGHT * rows + 0.5), STYLE | {"svg.hashsalt": figure.name}) as canvas:
        axes = list(canvas.subplots(rows, columns, squeeze=False).flat)
        for axis, panel in zip(axes, figure.panels, strict=False):
            _panel(axis, panel)
        for axis in axes[len(figure.panels) :]:
            axis.set_axis_off()
        _legend(canvas, axes[: len(figure.panels)])
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # lay out once, draw twice
        files = save(canvas, directory, figure.name)
    svg = next(path for path in files if path.suffix == ".svg").read_text("utf-8")
    return inline(svg, figure.name, round(96 * (width * columns + 0.4)))


LEAST = 0.85  # of a drawing's width, at which its smallest text (8 pt) has 9 pixels


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


def _panel(axis: Axes, panel: Panel) -> None:
    axis.set_title(_label(panel.title))
    axis.set_ylabel(_label(panel.y))
    for place, (label, curve) in enumerate(panel.lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        marker = "o" if len(curve) <= 12 else None
        axis.plot(
            curve.index,
            curve["value"],
            color=colour,
            linestyle=DASHES[place % len(DASHES)],
            marker=marker,
            markersize=3,
            label=_label(label),
        )
        if "low" in curve:
            axis.fill_between(curve.index, curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
    if panel.lines:
        axis.set_xlabel(panel.x)
    if panel.bars:
        _bars(axis, panel)
    axis.grid(axis="y", alpha=0.25, linewidth=0.5, color="#888888")


def _bars(axis: Axes, panel: Panel) -> None:
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
            color=COLOURS[place % len(COLOURS)],
            error_kw={"ecolor": INK, "elinewidth": 0.8},
            hatch=HATCHES[place % len(HATCHES)],
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


def inline(svg: str, name: str, width: int) -> str:
    """Return the drawing for a page, at most `width` pixels wide, on a narrow page at least LEAST of it: no prologue,
    unique ids, and the page's colours in place of black and white."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    key = re.sub(r"[^A-Za-z0-9]+", "-", name)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{key}-", body)
    body = re.sub(rf"\b(fill|stroke): {INK}", r"\1: currentColor", body)
    body = re.sub(rf"\bfill: {PAPER}", "fill: none", body)  # the background; hatches stay white
    # scales with the page; hidden from screen readers, which have the caption and the table
    tag, rest = body.split(">", 1)
    attributes = re.sub(r'\b(width|height)="[^"]*"', "", tag.removeprefix("<svg"))
    style = f"max-width: {width}px; --least-width: {round(LEAST * width)}px"
    return f'<svg aria-hidden="true" focusable="false" style="{style}" {attributes}>{rest}'
