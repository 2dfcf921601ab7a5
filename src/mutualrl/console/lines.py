"""One line for people on stderr, from a process that has no terminal of its own."""

from __future__ import annotations

import sys


def notify(text: object) -> None:
    """Write `mutualrl: TEXT` to stderr, at once."""
    print(f"mutualrl: {text}", file=sys.stderr, flush=True)
