"""Resolve flags and files to one recipe, or raise one error that lists every problem."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import get_args

from mutualrl.errors import RecipeError
from mutualrl.process.plugins import absolute_path, entry_points, is_import_path
from mutualrl.recipes import yaml_file
from mutualrl.recipes.layers import Layer, Layers, anchor_code, find, recipe_file, shipped, with_name_keys
from mutualrl.recipes.request import Request
from mutualrl.recipes.schema import (
    Recipe,
)
from mutualrl.recipes.trainer_table import Settings
from mutualrl.recipes.validation import validate
from mutualrl.references import POLICY_NAME, data_path
from mutualrl.regimes import (
    SEPARATOR,
    Regime,
    baseline,
    get_regime,
    is_combined,
    parts_of,
    regimes,
)
from mutualrl.sources.section import Kind
from mutualrl.storage.rundir import RunDirectory

#: the paper's base algorithm (Section "Hyperparameters") where it differs from TRL's defaults.
BASE_TRAINER: Settings = {
    "loss_type": "grpo",
    "scale_rewards": "group",
    "epsilon": 0.2,
    "beta": 1e-3,
    "temperature": 1.0,
    "num_generations": 8,
    "max_completion_length": 256,
}

logger = logging.getLogger(__name__)


def resolve(request: Request) -> Recipe:
    """Return the resolved recipe: defaults < pool < task < regime < recipe file < flags < --set.

    Raises RecipeError with every problem found, each with its source, its key and the expected value.
    """
    if request.recipe is not None:
        request = replace(request, recipe=recipe_file(request.recipe))
    file_layer = {} if request.recipe is None else with_name_keys(yaml_file.read(request.recipe), str(request.recipe))
    if request.recipe is not None:
        anchor_code(file_layer, request.recipe.resolve().parent)
    _require_no_pool(request, file_layer)
    assigned = Layers()
    for assignment in request.assignments:
        assigned.set(assignment)
    layers = Layers()
    layers.add({"trainer": dict(BASE_TRAINER)}, "defaults")
    pool = _pool(assigned.value) or request.pool or _pool_of_file(file_layer, request, assigned.value)
    if request.models:
        pool = None
        layers.add({"policies": policies_of(request.models)}, f"--model {' --model '.join(request.models)}")
    if pool is not None:  # if the recipe lists its own policies, its `pool` is only a label
        layers.add_file(find("pools", pool))
        layers.add({"pool": re.sub(r"[^A-Za-z0-9._-]+", "-", Path(pool).stem)[:64]}, "--pool")
    for key, flag, fallback in (("task", request.task, "arithmetic"), ("regime", request.regime, baseline().name)):
        requested = None if flag is None else _absolute(key, flag)
        chosen = (
            _name(assigned.value, key) or requested or _name(file_layer, key) or _name(layers.value, key) or fallback
        )
        for layer in (layers.value, file_layer):
            if _name(layer, key) not in (None, chosen):
                layer[key] = {}  # drop the settings of a task or regime other than the requested one
        if key == "regime":
            _drop_settings_of_other_regimes(layers.value, chosen, warn=requested is not None)
        own = layers.value.get(key)  # of the pool: more specific than what is shipped with the task or regime
        own = {name: deepcopy(each) for name, each in own.items() if name != "name"} if isinstance(own, dict) else {}
        _add_shipped(layers, key, chosen)
        if own:
            layers.add({key: own}, str(pool))
        layers.add({key: {"name": chosen}}, f"--{key} {chosen}" if chosen == requested else "defaults")
    if request.recipe is not None:
        label = pool is None and not request.models
        recipe_layer = {key: value for key, value in file_layer.items() if key != "pool" or label}
        layers.add_layer(recipe_layer, request.recipe.resolve())
    _add_flags(layers, request)
    _add_sources(layers, request.sources)
    for assignment in request.assignments:
        layers.set(assignment)
    return validate(layers)


def _pool_of_file(file_layer: Layer, request: Request, assigned: Layer) -> str | None:
    """Return the pool of a recipe file, which may be empty; None if it lists its policies. Without one, it is the pool
    of the first requested regime that has one of its own."""
    if "policies" in file_layer:
        return None
    if (pool := _pool(file_layer)) is not None:
        return pool
    regime = _name(assigned, "regime") or request.regime or _name(file_layer, "regime")
    known = [regimes()[part] for part in parts_of(regime or "") if part in regimes()]
    return next((each.default_pool for each in known if each.default_pool != Regime.default_pool), Regime.default_pool)


def _require_no_pool(request: Request, file_layer: Layer) -> None:
    """Raise RecipeError if policies are named twice: by `--model` and otherwise."""
    other = "--pool" if request.pool is not None else str(request.recipe) if "policies" in file_layer else None
    if request.models and other is not None:
        raise RecipeError([f"--model: {other} has policies, too; give one of the two"])


def policies_of(models: Sequence[str]) -> list[Layer]:
    """Return the policies of `--model` options: each is named after the last part of its model."""
    policies: list[Layer] = []
    for model in models:
        stem = re.sub(r"[^a-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower())
        name = stem.strip("._-") or "policy"
        taken = [policy["name"] for policy in policies]
        number = next(n for n in range(1, len(taken) + 2) if (name if n == 1 else f"{name}-{n}") not in taken)
        policies.append({"name": name if number == 1 else f"{name}-{number}", "model": model})
    return policies


def _add_sources(layers: Layers, given: Sequence[str]) -> None:
    """Add the sources of `--source` options to the recipe's; one of the same name replaces it."""
    for text in given:
        source = _parsed_source(text)
        known = layers.value.get("sources")
        others = [each for each in known if each.get("name") != source["name"]] if isinstance(known, list) else []
        layers.add({"sources": [*others, source]}, f"--source {text}")


def _parsed_source(text: str) -> Layer:
    """Return the section of a `--source NAME=KIND:REFERENCE` option. Raises RecipeError for any other form."""
    name, equals, rest = text.partition("=")
    kind, colon, reference = rest.partition(":")
    if equals and not re.fullmatch(POLICY_NAME, name):
        form = "expected lower-case letters, digits, '.', '_' or '-'"
        raise RecipeError([f"--source {text}: found the name {name!r}; {form}"])
    if not equals or not colon or kind not in get_args(Kind) or not reference or not name:
        raise RecipeError(
            [
                f"--source {text}: expected NAME=recorded:REFERENCE, where REFERENCE is a file, a directory, "
                "hub:OWNER/NAME, or task (the solutions in the task's data); NAME=served:URL, the URL of an "
                "OpenAI-compatible endpoint; or NAME=frozen:MODEL, a directory or a hub id"
            ]
        )
    return {"name": name, kind: reference}


def _drop_settings_of_other_regimes(value: Layer, chosen: str, *, warn: bool) -> None:
    """Remove the pool's settings of regimes other than the chosen one: a pool serves every regime. Settings that no
    regime has are left to be refused."""
    known = chosen in regimes() or is_import_path(chosen) or chosen in entry_points("mutualrl.regimes")
    if is_combined(chosen):
        _nest_settings(value, [part for part in parts_of(chosen) if part in regimes()])
    if is_combined(chosen) or not known:  # a name that is refused later
        return
    own = get_regime(chosen).model_fields
    others = {name for regime in regimes().values() for name in regime.model_fields}
    policies = value.get("policies")
    dropped: dict[str, None] = {}
    for section in (value, *(policies if isinstance(policies, list) else ())):
        settings = section.get("regime") if isinstance(section, dict) else None
        if not isinstance(settings, dict):
            continue
        for name in [*settings]:
            if name != "name" and name not in own and name in others:
                del settings[name]
                dropped[name] = None
    if dropped and warn:
        logger.warning("the pool sets regime.%s, which %s does not have: left out", ", regime.".join(dropped), chosen)


def _nest_settings(value: Layer, parts: Sequence[str]) -> None:
    """Move the pool's settings of one regime under the name of each of `parts` that has them."""
    policies = value.get("policies")
    for section in (value, *(policies if isinstance(policies, list) else ())):
        settings = section.get("regime") if isinstance(section, dict) else None
        if not isinstance(settings, dict):
            continue
        for name in [*settings]:
            owners = [part for part in parts if name in regimes()[part].model_fields]
            if owners and name != "name":
                setting = settings.pop(name)
                for part in owners:
                    settings.setdefault(part, {}).setdefault(name, setting)


def revise(run: RunDirectory, request: Request) -> Recipe:
    """Return the recipe of a resumed run: its own, overridden by the plain flags and `--set`. A request that names a
    recipe, pool, regime or task is resolved as for a new run. Raises RecipeError as `resolve` does."""
    if any((request.recipe, request.pool, request.models, request.regime, request.task)):
        return resolve(request)
    layers = Layers()
    layers.add_text(run.recipe_text(), run.recipe)
    _add_flags(layers, request)
    _add_sources(layers, request.sources)
    for assignment in request.assignments:
        layers.set(assignment)
    return validate(layers)


def _pool(layer: Layer) -> str | None:
    value = layer.get("pool")
    if value is not None and not isinstance(value, str):
        raise RecipeError([f"pool: found {repr(value)[:80]}, expected a name or the path of a .yaml file"])
    return value


def _name(layer: Layer, key: str) -> str | None:
    section = layer.get(key)
    return section.get("name") if isinstance(section, dict) else None


def _absolute(key: str, name: str) -> str:
    """Return the name in a flag, with file paths made absolute."""
    parts = parts_of(name) if key == "regime" else [name]
    return SEPARATOR.join(absolute_path(part) for part in parts)


def _add_shipped(layers: Layers, key: str, chosen: str) -> None:
    """Add the shipped layer of a task or regime; for several regimes, that of each, its settings under its name."""
    shipped_names = {n for kind, n, _ in shipped() if kind == f"{key}s"}
    if chosen in shipped_names:
        layers.add_file(find(f"{key}s", chosen))
        return
    for part in parts_of(chosen) if key == "regime" else ():
        if part in shipped_names:
            path = find("regimes", part)
            layers.add_layer(_nested_under_name(yaml_file.read(path)), path)


def _nested_under_name(layer: Layer) -> Layer:
    """Return a shipped regime's layer for a list of regimes: its settings under its name."""
    section = dict(layer["regime"])
    name = section.pop("name")
    return {**layer, "regime": {name: section}}


def _add_flags(layers: Layers, request: Request) -> None:
    for flag, path, value in (
        ("--steps", ("run", "steps"), request.steps),
        ("--seed", ("run", "seed"), request.seed),
        ("--run-dir", ("run", "dir"), request.run_dir and str(request.run_dir)),
        ("--data", ("task", "data"), request.data and data_path(request.data)),
    ):
        if value is not None:
            layers.add({path[0]: {path[1]: value}}, f"{flag} {value}")
