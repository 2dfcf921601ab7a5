"""What a sweep declares before its first run, as one digest, and what was changed after it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mutualrl.recipes.differences import decisive
from mutualrl.storage.files import JsonObject
from mutualrl.study.sweep_file import Sweep


def registration(sweep: Sweep) -> JsonObject:
    """Return what a sweep declares: the sha256 of its claims, its pools, arms, settings and seeds, how it evaluates,
    and the resolved recipe of each arm on each pool, steps and models among it."""
    file = sweep.file.model_dump(mode="json", by_alias=True, exclude={"budget", "seeds", "claims"})
    recipes: dict[str, dict[str, object]] = {}
    for (pool, arm), recipe in sweep.recipes.items():
        recipes.setdefault(pool, {})[arm] = decisive(recipe)
    claims = None if sweep.claims is None else sweep.claims.sha256
    declared = {**file, "seeds": list(sweep.file.seed_list), "claims": claims, "recipes": recipes}
    content: JsonObject = json.loads(json.dumps(declared))
    return content


def digest(declared: Mapping[str, object]) -> str:
    """Return the sha256 of a registration."""
    return hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two registrations, a line each: `KEY: BEFORE -> NOW`, of lists what was added and
    left out. A key that changed alike in several recipes is one line; arms and pools that only one of both has are
    named as such, without their recipes."""
    before, now = dict(before), dict(now)
    old_recipes, new_recipes = before.pop("recipes", {}), now.pop("recipes", {})
    lines = _differences(before, now, "")
    alike: Counter[str] = Counter()
    for pool in old_recipes.keys() & new_recipes.keys():
        for arm in old_recipes[pool].keys() & new_recipes[pool].keys():
            alike.update(_differences(old_recipes[pool][arm], new_recipes[pool][arm], ""))
    return [*lines, *(f"{line} (recipes: {count})" for line, count in sorted(alike.items()))]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], at: str) -> list[str]:
    lines: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        path = f"{at}.{key}" if at else str(key)
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            lines += _differences(old, new, path)
        elif isinstance(old, list) and isinstance(new, list):
            added, left_out = [each for each in new if each not in old], [each for each in old if each not in new]
            parts = [f"left out {_shown(left_out)}"] * bool(left_out) + [f"added {_shown(added)}"] * bool(added)
            lines.append(f"{path}: {', '.join(parts) or 'another order'}")
        elif isinstance(old, dict) or isinstance(new, dict):
            lines.append(f"{path}: {'left out' if new is None else 'added'}")
        else:
            lines.append(f"{path}: {_shown([old])} -> {_shown([new])}")
    return lines


def _shown(values: Sequence[object]) -> str:
    return ", ".join(
        "none" if value is None else str(value) if isinstance(value, str) else json.dumps(value) for value in values
    )
