"""Loading of large libraries."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, and keep what was imported out of every later one.

    torch, transformers and TRL make about a million objects that live as long as the process; to look through them
    again and again is a quarter of the CPU time in which a worker starts. transformers and TRL each read the records of
    all installed packages, too: here they are read once.
    """
    enabled, no_model_yet = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    read_packages = metadata.packages_distributions
    metadata.packages_distributions = functools.cache(read_packages)
    try:
        yield
    finally:
        metadata.packages_distributions = read_packages
        if no_model_yet:  # else garbage with weights in it might be kept forever
            gc.freeze()
        if enabled:
            gc.enable()
