"""Recipes: schema, loading, and the recipes shipped with mutualrl. No torch. Modules are imported on use: the command
line reads `Request` for its help."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutualrl.recipes.layers import recipe_root, shipped, templates
    from mutualrl.recipes.request import Request
    from mutualrl.recipes.resolution import resolve, revise
    from mutualrl.recipes.schema import Policy, Recipe
    from mutualrl.recipes.stored import dump, load, load_run, stored_recipe

_MODULES = {
    "layers": ("recipe_root", "shipped", "templates"),
    "request": ("Request",),
    "resolution": ("resolve", "revise"),
    "schema": ("Policy", "Recipe"),
    "stored": ("dump", "load", "load_run", "stored_recipe"),
}
__all__ = [
    "Policy",
    "Recipe",
    "Request",
    "dump",
    "load",
    "load_run",
    "recipe_root",
    "resolve",
    "revise",
    "shipped",
    "stored_recipe",
    "templates",
]


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
