"""Errors of ours in a user's script: the message ends the process, without a traceback, as it ends a command."""

from __future__ import annotations

import sys
from types import TracebackType

from mutualrl.console.lines import notify
from mutualrl.errors import MutualRLError

_previous = sys.excepthook


def show_messages_only() -> None:
    """Show an uncaught error of ours as its message; any other as before."""
    global _previous
    if sys.excepthook is not _show:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, MutualRLError):
        notify(error)
    else:
        _previous(kind, error, trace)
