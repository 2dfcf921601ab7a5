"""Message lines on stderr, from processes without a terminal."""

from __future__ import annotations

import sys


def notify(text: object) -> None:
    """Write `mutualrl: TEXT` to stderr and flush."""
    print(f"mutualrl: {text}", file=sys.stderr, flush=True)
