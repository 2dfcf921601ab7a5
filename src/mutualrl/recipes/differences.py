"""Differences between two resolved recipes. Which keys may differ is declared with each key (`recipes.free`)."""

from __future__ import annotations

from collections.abc import Mapping

from mutualrl.process.plugins import portable_path
from mutualrl.recipes.free import may_differ
from mutualrl.recipes.schema import Recipe
from mutualrl.regimes import SEPARATOR


def changed_keys(old: Recipe, new: Recipe) -> dict[str, tuple[object, object]]:
    """Return the keys in which two resolved recipes differ, with both values."""
    changed = differing(by_dotted_key(old.model_dump(mode="json")), by_dotted_key(new.model_dump(mode="json")))
    changed.pop("run.dir", None)
    return changed


def differing(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return the keys in which two mappings differ, with both values."""
    keys = sorted({*before, *now})
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def by_dotted_key(value: object, at: str = "") -> dict[str, object]:
    """Return the leaves of a recipe by dotted key, with policies keyed by name."""
    if isinstance(value, dict):
        pairs = [(f"{at}.{key}" if at else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        names = [item.get("name", place) if isinstance(item, dict) else place for place, item in enumerate(value)]
        pairs = [(f"{at}.{name}", item) for name, item in zip(names, value, strict=True)]
    else:
        return {at: value}
    return {key: leaf for path, item in pairs for key, leaf in by_dotted_key(item, path).items()}


def decisive(recipe: Recipe) -> dict[str, object]:
    """Return the keys of a resolved recipe that must be equal for all policies of a run. The directory of the user's
    code is not compared: its content is in the fingerprint."""
    values = by_dotted_key(recipe.model_dump(mode="json", exclude=None if recipe.sources else {"sources"}))
    code = {"task.name": recipe.task.name, "regime.name": recipe.regime_name}
    values |= {key: SEPARATOR.join(map(portable_path, name.split(SEPARATOR))) for key, name in code.items()}
    values["task.reward"] = [portable_path(path) for path in recipe.task.reward]
    values["task.tools"] = [portable_path(path) for path in recipe.task.tools]
    if recipe.task.environment is not None:
        values["task.environment"] = portable_path(recipe.task.environment)
    return {key: value for key, value in values.items() if not may_differ(Recipe, key, "machines")}
