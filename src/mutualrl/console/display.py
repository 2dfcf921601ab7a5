"""One function that cleans text written by a model, or read from a run, before it reaches a terminal."""

from __future__ import annotations

import unicodedata

from rich.markup import escape


def clean(text: str, limit: int = 2000) -> str:
    """Return `text` without what a terminal would obey: control and format characters (escape sequences, bidi
    overrides, zero-width marks) become U+FFFD, newlines and tabs stay; cut at `limit` characters.

    The result may still read as Rich markup: print it with `markup=False`, or use `cell`.
    """
    cut = text[:limit]
    if cut.replace("\n", "").replace("\t", "").isprintable():  # nearly all text: no character of category C is
        selected = cut
    else:
        selected = "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in cut)
    return selected + (f" ... ({len(text)} characters)" if len(text) > limit else "")


def duration(seconds: float) -> str:
    """Return seconds in the unit that a person would take."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def cell(text: str) -> str:
    """Return `text` cleaned, and escaped for a Rich table or console."""
    return escape(clean(text, 200))
