"""The regimes, one module each; a module with a `SPEC` is a regime, and nothing else needs to know it."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from mutualrl.errors import UsageError
from mutualrl.regimes.base import RegimeSettings, RegimeSpec


@cache
def regimes() -> dict[str, RegimeSpec]:
    """All regimes by name."""
    found: dict[str, RegimeSpec] = {}
    for info in pkgutil.iter_modules(__path__):
        spec = getattr(importlib.import_module(f"{__name__}.{info.name}"), "SPEC", None)
        if isinstance(spec, RegimeSpec):
            found[spec.name] = spec
    return found


def get_regime(name: str) -> RegimeSpec:
    """The regime of that name. Raises UsageError naming those there are."""
    if name not in regimes():
        raise UsageError(f"unknown regime {name!r}; expected one of: {', '.join(sorted(regimes()))}")
    return regimes()[name]


__all__ = ["RegimeSettings", "RegimeSpec", "get_regime", "regimes"]
