"""Recipes as they are stored with a run: written, and read back."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from mutualrl.errors import RecipeError
from mutualrl.recipes import yaml_file
from mutualrl.recipes.layers import Layers
from mutualrl.recipes.schema import Recipe
from mutualrl.recipes.validation import explain, model_problems, validate
from mutualrl.storage.rundir import RunDirectory


def dump(recipe: Recipe) -> str:
    """Return a resolved recipe as YAML; `load` reads back the same recipe."""
    value = recipe.model_dump(mode="json", exclude_none=True)
    for policy, section in zip(recipe.policies, value["policies"], strict=True):
        if recipe.lora is not None and recipe.lora_settings(policy.name) is None:
            section["lora"] = None
    if not recipe.sources:
        del value["sources"]
    if recipe.run.epochs is not None:
        del value["run"]["steps"]  # not derived from the epochs yet
    return yaml_file.dump(value)


def load(path: Path) -> Recipe:
    """Return a resolved recipe written by `dump`."""
    layers = Layers()
    layers.add_file(path)
    return validate(layers, run_code=False)


def stored_recipe(run: RunDirectory) -> Recipe:
    """Return the recipe of a run as its policies train it: read, not checked again, since the start has resolved and
    checked it. Raises RecipeError where this machine lacks a model, and as `RunDirectory.recipe_text` does."""
    layers = Layers()
    layers.add_text(run.recipe_text(), run.recipe)
    try:
        recipe = Recipe.model_validate(layers.value)
    except ValidationError as error:
        raise RecipeError(explain(error, layers, (), None)) from None
    if missing := model_problems(layers):
        raise RecipeError(missing)
    return recipe


def load_run(run: RunDirectory, *, without_models: bool = False, run_code: bool = False) -> Recipe:
    """Return the recipe of a run. With `run_code` the user's regime and task are imported, as for a resumption; without
    it, as for commands that only inspect a run, none of its code is executed. With `without_models` the models need not
    be here: the run may have been made on another machine. Raises RecipeError, and as `RunDirectory.recipe_text`
    does."""
    layers = Layers()
    layers.add_text(run.recipe_text(), run.recipe)
    return validate(layers, run_code=run_code, models=not without_models)
