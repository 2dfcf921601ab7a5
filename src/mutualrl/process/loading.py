"""Loading of large libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, and keep what was imported out of every later one.

    torch, transformers and TRL make about a million objects that live as long as the process; to look through them
    again and again is a quarter of the CPU time in which a worker starts.
    """
    enabled, no_model_yet = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if no_model_yet:  # else garbage with weights in it might be kept for ever
            gc.freeze()
        if enabled:
            gc.enable()
