"""One line on stderr from a process without a terminal."""

from __future__ import annotations

import sys


def notify(text: object) -> None:
    """Write `mutualrl: TEXT` to stderr, at once."""
    print(f"mutualrl: {text}", file=sys.stderr, flush=True)
