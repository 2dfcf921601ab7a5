"""Recipes: schema, loading, and the recipes shipped with mutualrl. No torch. Modules are imported on use: the command
line reads `Request` for its help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.imported import on_first_use

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
__getattr__ = on_first_use(__name__, _MODULES)
