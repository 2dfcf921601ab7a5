"""Import of large libraries."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from later collections.

    torch, transformers and TRL create about a million objects that live as long as the process; scanning them
    repeatedly takes a quarter of the CPU time of a worker's start. transformers and TRL also each read the metadata of
    all installed packages; here they are read once.
    """
    enabled, no_model_yet = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    read_packages = metadata.packages_distributions
    metadata.packages_distributions = functools.cache(read_packages)
    try:
        yield
    finally:
        metadata.packages_distributions = read_packages
        if no_model_yet:  # otherwise garbage that holds weights might never be collected
            gc.freeze()
        if enabled:
            gc.enable()
