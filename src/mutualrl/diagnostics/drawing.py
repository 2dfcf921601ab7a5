"""What the figures of diagnostics share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.console.display import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def short(text: str) -> str:
    """Return a name as a label: cleaned, the last 24 characters."""
    text = clean(text, 200).replace("\n", " ")
    return text if len(text) <= 24 else "…" + text[-23:]


def legend(axis: Axes, **options: object) -> None:
    """Draw a legend without parsing its labels as formulas."""
    for text in axis.legend(**options).get_texts():
        text.set_parse_math(False)
