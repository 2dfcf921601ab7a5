"""Regimes: rules by which policies share experience.

A module of this package with a `SPEC` is a regime. So is the `SPEC` of a user's file or package (`--regime
file.py:SPEC`, `--regime package.module:SPEC`), and an entry point in the group `mutualrl.regimes`. No other part of
the system refers to a regime by name.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from functools import cache

from pydantic import ValidationError

from mutualrl.errors import RegimeError
from mutualrl.plugins import FORM, entry_points, is_import_path, load_object
from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes.channels import SEPARATOR, combined
from mutualrl.regimes.round import (
    BOUNDS,
    PPO,
    Answers,
    Band,
    Bound,
    ExtraRow,
    GuideView,
    Needs,
    PeerRound,
    Plan,
    RoundView,
    RowSource,
    RowStatistics,
    SequenceLevel,
    Stepwise,
    Trace,
    Transfer,
    UpperBound,
    check_plan,
    plain_state,
    whitened_plan,
)
from mutualrl.regimes.spec import Metric, RegimeSettings, RegimeSpec

GROUP = "mutualrl.regimes"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@cache
def regimes() -> dict[str, RegimeSpec]:
    """Return the regimes that ship with mutualrl, by name."""
    specs: dict[str, RegimeSpec] = {}
    for info in pkgutil.iter_modules(__path__):
        spec = getattr(importlib.import_module(f"{__name__}.{info.name}"), "SPEC", None)
        if isinstance(spec, RegimeSpec):
            specs[spec.name] = spec
    return specs


def baseline() -> RegimeSpec:
    """Return the regime that shares nothing, to which the others are compared."""
    return next(spec for spec in regimes().values() if spec.plan is None)


@cache
def at_level(level: str) -> RegimeSpec:
    """Return the paper's regime at one level of sharing: data, value or outcome."""
    return next(spec for spec in regimes().values() if spec.level == level and not spec.control)


def is_combined(name: str) -> bool:
    """Return whether a name combines several regimes, e.g. `xgrpo+sgt`."""
    return len(parts_of(name)) > 1


def parts_of(name: str) -> list[str]:
    """Return the names of the regimes in a combined name: `xgrpo+./c++/own.py:SPEC` has two, the second an import path
    that contains a plus. A part ends at a plus if it is a plain name, or an import path with its object."""
    parts: list[str] = []
    current = ""
    for piece in name.split(SEPARATOR):
        current = f"{current}{SEPARATOR}{piece}" if current else piece
        if NAME.fullmatch(current) or ":" in current:
            parts.append(current)
            current = ""
    return [*parts, current] if current else parts


def is_open(name: str) -> bool:
    """Return whether a name refers to code outside this package: looking it up runs that code."""
    return any(part not in regimes() for part in parts_of(name))


@cache
def get_regime(name: str) -> RegimeSpec:
    """Return the regime with that name, import path or entry point.

    `A+B` combines A and B. Raises RegimeError with file and line if it cannot be imported or is not a RegimeSpec; for
    an unknown name, with the known names.
    """
    if name in regimes():
        return regimes()[name]
    if is_combined(name):
        return combined([get_regime(part) for part in parts_of(name)])
    if is_import_path(name):
        return _checked(load_object(name, "regime", RegimeError), name)
    plugins = entry_points(GROUP)
    if name in plugins:
        return _checked(load_object(plugins[name].value, f"regime {name!r}", RegimeError), name)
    known = sorted({*regimes(), *plugins})
    matches = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {matches[0]!r}?)" if matches else ""
    raise RegimeError(f"unknown regime {name!r}; expected one of: {', '.join(known)}{hint}; or {FORM}")


def _checked(spec: object, name: str) -> RegimeSpec:
    if not isinstance(spec, RegimeSpec):
        raise RegimeError(f"regime {name!r}: found {type(spec).__name__}, expected a mutualrl.regimes.RegimeSpec")
    if not isinstance(spec.settings, type) or not issubclass(spec.settings, RegimeSettings):
        raise RegimeError(f"regime {name!r}: settings: found {spec.settings!r}, expected a subclass of RegimeSettings")
    if not isinstance(spec.name, str) or NAME.fullmatch(spec.name) is None:
        raise RegimeError(f"regime {name!r}: name: found {spec.name!r}, expected letters a-z, digits, '.', '_', '-'")
    try:
        spec.settings()
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise RegimeError(f"regime {name!r}: setting {key!r} has no default; every setting needs one") from None
    if not callable(spec.publishes) or not (spec.plan is None or callable(spec.plan)):
        raise RegimeError(f"regime {name!r}: plan and publishes: expected functions")
    if spec.name in regimes():
        raise RegimeError(f"regime {name!r}: name {spec.name!r} belongs to a regime of mutualrl; choose another name")
    return spec


__all__ = [
    "BOUNDS",
    "PPO",
    "SEPARATOR",
    "Answers",
    "Band",
    "Bound",
    "ExtraRow",
    "GuideView",
    "Metric",
    "Needs",
    "PeerRound",
    "Plan",
    "PublishSchema",
    "RegimeSettings",
    "RegimeSpec",
    "Rollout",
    "RoundView",
    "RowSource",
    "RowStatistics",
    "SequenceLevel",
    "Stepwise",
    "Trace",
    "Transfer",
    "UpperBound",
    "at_level",
    "baseline",
    "check_plan",
    "get_regime",
    "is_combined",
    "is_open",
    "parts_of",
    "plain_state",
    "regimes",
    "whitened_plan",
]
