"""Recipes: schema, loading, and the recipes shipped with mutualrl. No torch."""

from mutualrl.recipes.layers import recipe_root, shipped, templates
from mutualrl.recipes.resolve import Request, dump, load, load_run, resolve, revise
from mutualrl.recipes.schema import Policy, Recipe

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
    "templates",
]
