"""Markdown tables, whose cells are cleaned of control characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mutualrl.console.display import clean


def name(text: str, limit: int = 80) -> str:
    """Return a name from a run as text: without markup of Markdown or HTML, on one line, also in a table cell."""
    shown = clean(text, limit).replace("|", "\\|").replace("\n", " ").replace("`", "'")
    return shown.replace("<", "&lt;").replace("![", "!\\[")


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a titled table, without control characters and line breaks in its cells."""
    lines = [f"**{_line(title)}**", "", _row(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_line, cells)) + " |"


def _line(text: str) -> str:
    return clean(text, 1000).replace("\n", " ").replace("\t", " ")


def number(value: float | None, digits: int = 4) -> str:
    """Return a formatted number; `NaN` if it is undefined (a rate over no items)."""
    if value is None or math.isnan(value):
        return "NaN"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def significant(value: float | None) -> str:
    """Return a number of any magnitude with four significant digits; `NaN` if it is undefined."""
    return "NaN" if value is None or math.isnan(value) else f"{value:.4g}"


def percent(fraction: float) -> str:
    """Return a fraction in percent: with four decimals, below 1 % with four significant digits (0.0109, 99.9876)."""
    value = 100 * fraction
    return f"{value:.4f}" if abs(value) >= 1 else significant(value)


def with_interval(value: float | None, interval: Sequence[float | None]) -> str:
    """Return a number with the bounds of its interval."""
    low, high = interval
    return f"{number(value)} [{number(low, 2)}, {number(high, 2)}]"


def sentence(text: str) -> str:
    """Return a sentence that may contain a user's names, cleaned for display, on one line."""
    return clean(text, 1000).replace("\n", " ")
