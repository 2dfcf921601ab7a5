"""Sanitizing of text from a model or a run before it reaches a terminal, and formatting of durations."""

from __future__ import annotations

import unicodedata

from rich.markup import escape


def clean(text: str, limit: int = 2000) -> str:
    """Return `text` without characters that a terminal interprets: control and format characters (escape sequences,
    bidi overrides, zero-width marks) become U+FFFD, newlines and tabs stay; truncated to `limit` characters.

    The result may still contain Rich markup: print it with `markup=False`, or use `cell`.
    """
    cut = text[:limit]
    if cut.replace("\n", "").replace("\t", "").isprintable():  # true of nearly all text; implies no category C
        cleaned = cut
    else:
        cleaned = "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in cut)
    return cleaned + (f" ... ({len(text)} characters)" if len(text) > limit else "")


def duration(seconds: float) -> str:
    """Return a duration in a readable unit: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def cell(text: str) -> str:
    """Return `text`, cleaned and escaped for a Rich table or console."""
    return escape(clean(text, 200))
