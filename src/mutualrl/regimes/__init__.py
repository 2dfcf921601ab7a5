"""Regimes: rules by which policies share experience.

A class of this package is a regime if it derives from `Regime` and has a name. So is a class in a user's file or
package (`--regime file.py:Shortest`, `--regime package.module:Shortest`), and an entry point in the group
`mutualrl.regimes`. No other part of the system refers to a regime by name.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from functools import cache

from pydantic import ValidationError

from mutualrl.errors import RegimeError
from mutualrl.process.plugins import FORM, entry_points, is_import_path, load_object
from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes.channels import SEPARATOR, combined
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.peers import peer_rewards, peer_rollouts
from mutualrl.regimes.regime import Regime, setting
from mutualrl.regimes.round import (
    BOUNDS,
    PPO,
    Band,
    Bound,
    ExtraRow,
    GuideView,
    Plan,
    Requests,
    Results,
    RoundView,
    RowSource,
    RowStatistics,
    Sample,
    Sampled,
    Stepwise,
    UpperBound,
    check_plan,
    plain_state,
    whitened_plan,
)
from mutualrl.regimes.transfer import Transfer
from mutualrl.storage.metrics import Metric
from mutualrl.trajectory import Trajectory

GROUP = "mutualrl.regimes"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@cache
def regimes() -> dict[str, type[Regime]]:
    """Return the regimes that ship with mutualrl, by name."""
    classes: dict[str, type[Regime]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Regime)
                and value.__module__ == module.__name__
                and value.name
            ):
                classes[value.name] = value
    return classes


def baseline() -> type[Regime]:
    """Return the regime that shares nothing, to which the others are compared."""
    return next(regime for regime in regimes().values() if not regime().needs().shares)


def is_combined(name: str) -> bool:
    """Return whether a name combines several regimes, e.g. `xgrpo+sgt`."""
    return len(parts_of(name)) > 1


def parts_of(name: str) -> list[str]:
    """Return the names of the regimes in a combined name: `xgrpo+./c++/own.py:Mine` has two, the second an import path
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
def get_regime(name: str) -> type[Regime]:
    """Return the regime with that name, import path or entry point.

    `A+B` combines A and B. Raises RegimeError with file and line if it cannot be imported or is not a regime; for
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


#: what a regime said of itself before it had `needs`
GONE = (
    *("traits", "publishes", "late", "same_prompts", "needs_source", "renders_trajectories", "uses_ratios"),
    *("changes_advantages", "moves_advantages", "asks_everywhere"),
)


def _checked(regime: object, name: str) -> type[Regime]:
    if not isinstance(regime, type) or not issubclass(regime, Regime):
        raise RegimeError(
            f"regime {name!r}: found {type(regime).__name__}, expected a subclass of mutualrl.regimes.Regime"
        )
    if not isinstance(regime.name, str) or NAME.fullmatch(regime.name) is None:
        raise RegimeError(f"regime {name!r}: name: found {regime.name!r}, expected letters a-z, digits, '.', '_', '-'")
    try:
        regime()
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise RegimeError(f"regime {name!r}: setting {key!r} has no default; every setting needs one") from None
    if gone := [old for old in GONE if old in dir(regime)]:
        raise RegimeError(
            f"regime {name!r}: has {', '.join(gone)}, which nobody asks; expected needs(), which returns a Needs with "
            "what they said (docs/extending.md)"
        )
    if not isinstance(needs := regime().needs(), Needs):
        raise RegimeError(f"regime {name!r}: needs() returned {type(needs).__name__}, expected mutualrl.regimes.Needs")
    if regime.name in regimes():
        raise RegimeError(f"regime {name!r}: name {regime.name!r} belongs to a regime of mutualrl; choose another name")
    return regime


def __getattr__(name: str) -> object:
    if name in ("RegimeSpec", "RegimeSettings", "RegimeTraits"):
        raise ImportError(
            f"mutualrl.regimes.{name} is gone: a regime is a class with its settings as fields and its functions as "
            "methods; write `class Mine(Regime)` with `name` and `plan(self, view)`, and name it as FILE.py:Mine "
            "(docs/extending.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BOUNDS",
    "PPO",
    "SEPARATOR",
    "Band",
    "Bound",
    "ExtraRow",
    "GuideView",
    "Metric",
    "Needs",
    "Plan",
    "PublishSchema",
    "Regime",
    "Requests",
    "Results",
    "Rollout",
    "RoundView",
    "RowSource",
    "RowStatistics",
    "Sample",
    "Sampled",
    "Stepwise",
    "Trajectory",
    "Transfer",
    "UpperBound",
    "baseline",
    "check_plan",
    "get_regime",
    "is_combined",
    "is_open",
    "parts_of",
    "peer_rewards",
    "peer_rollouts",
    "plain_state",
    "regimes",
    "setting",
    "whitened_plan",
]
