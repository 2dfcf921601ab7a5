"""Sanitizing of text from a model or a run before it reaches a terminal, and formatting of durations."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import MutableMapping

from rich.console import Console
from rich.markup import escape

NARROWEST = 20  # columns below which a width is not believed: COLUMNS=0 would print nothing
PLAIN_BELOW = 60  # columns below which a table is printed as lines


def correct_columns(environment: MutableMapping[str, str]) -> None:
    """Replace a width in COLUMNS that nothing can be printed in: below NARROWEST by that, 0 and no number by none."""
    given = environment.get("COLUMNS")
    if given is None:
        return
    if not given.strip().isdecimal() or int(given) == 0:
        del environment["COLUMNS"]
    elif int(given) < NARROWEST:
        environment["COLUMNS"] = str(NARROWEST)


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console for text and tables. Names such as `:x:` are not rendered as emoji."""
    console = Console(stderr=stderr, emoji=False, width=width)
    if console.width < NARROWEST or os.environ.get("COLUMNS", "1").strip() in ("0", ""):
        console = Console(stderr=stderr, emoji=False, width=max(console.width, 80))
    return console


def print_text(console: Console, text: object, limit: int = 20_000) -> None:
    """Print text that may come from a model, a run, or a user: cleaned, not interpreted, each line however long."""
    console.print(clean(str(text), limit), markup=False, highlight=False, soft_wrap=True)


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


_LONG_WORD = re.compile(r"\S{1000,}")


def shortened(message: str) -> str:
    """Return an error message in which a word of over a thousand characters, such as an option that was pasted, is cut
    to its beginning."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:200]}[... {len(word[0]) - 200:,} more characters]", message)


_PATH = re.compile(r"""(?<![\w.~:/-])(?:~|/)[^\s"'`,;|]*/([^\s/"'`,;|]+)""")


def last_parts(text: str) -> str:
    """Return a text with absolute paths cut to their last part, for readers on other machines."""
    return _PATH.sub(r"\1", text)


def duration(seconds: float) -> str:
    """Return a duration in a readable unit: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def cell(text: str) -> str:
    """Return `text`, cleaned and escaped for a Rich table or console."""
    return escape(clean(text, 200))


def group_label(group: str | None) -> str:
    """Return the name of a group of an accuracy; `all` for None."""
    return "all" if group is None else group or "(no name)"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 text`, `1,200 texts`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def times(count: int) -> str:
    """Return how often: `once`, `3 times`."""
    return "once" if count == 1 else f"{count:,} times"
