"""Resolve flags and files to one recipe, or raise one error that lists every problem."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mutualrl.errors import RecipeError, RegimeError, TaskError
from mutualrl.plugins import absolute_path, entry_points, is_import_path
from mutualrl.recipes import yaml_file
from mutualrl.recipes.batch_plan import TRL_BATCHING_KEYS
from mutualrl.recipes.layers import Layer, Layers, anchor_code, find, recipe_file, shipped, with_name_keys
from mutualrl.recipes.ratios import aggregation_problem, ratio_problems, server_problems
from mutualrl.recipes.request import Request
from mutualrl.recipes.schema import (
    ExchangeSection,
    HardwareSection,
    LaunchSection,
    LoraSection,
    Policy,
    Recipe,
    RoundSection,
    RunSection,
    TaskSection,
)
from mutualrl.recipes.source_section import KEYS_OF, Kind, SourceColumns, SourceSection
from mutualrl.recipes.trainer_keys import quantization, validate_trainer_key
from mutualrl.recipes.trainer_table import Settings
from mutualrl.records import POLICY_NAME
from mutualrl.regimes import (
    SEPARATOR,
    Regime,
    baseline,
    get_regime,
    is_combined,
    is_open,
    parts_of,
    regimes,
)
from mutualrl.regimes.regime import flat, merged
from mutualrl.storage.bucket_url import redacted
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks import TASKS, get_task
from mutualrl.tasks.hub_data import data_path
from mutualrl.tasks.turns import NO_TURNS, NOT_SHARED

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
DEFAULT_PROMPTS = 8
GONE = "gone/"

logger = logging.getLogger(__name__)

_SECTIONS: dict[str, type[BaseModel]] = {
    "task": TaskSection,
    "round": RoundSection,
    "run": RunSection,
    "hardware": HardwareSection,
    "launch": LaunchSection,
    "lora": LoraSection,
    "exchange": ExchangeSection,
}


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
        own = {name: setting for name, setting in own.items() if name != "name"} if isinstance(own, dict) else {}
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
    if is_combined(chosen) or not known:  # settings under the names of its parts; a name that is refused later
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


def validate(layers: Layers, *, run_code: bool = True) -> Recipe:
    """Validate the merged layers. Raises RecipeError with every problem found, RegimeError for a regime that cannot be
    imported. Without `run_code`, regimes and tasks outside this package are neither imported nor checked."""
    problems: list[str] = []
    value = layers.value
    for key, default in (("task", TaskSection().name), ("regime", baseline().name)):
        value.setdefault(key, {}).setdefault("name", default)
    name = value["regime"]["name"]
    checked = run_code or not is_open(name)
    _check_names(value, layers, problems, run_code=run_code)
    regime = get_regime(name) if checked else None
    if checked and is_combined(name):
        _key_user_regimes_by_name(value["regime"])
    for path, settings in _trainer_sections(value):
        for key, setting in settings.items():
            if (problem := validate_trainer_key(key, setting)) is not None:
                problems.append(_line(layers, (*path, key), problem))
    recipe = None
    try:
        recipe = Recipe.model_validate(_with_round(value))
    except ValidationError as error:
        problems.extend(_explain(error, layers, (), regime))
    if recipe is not None and not problems and checked:
        problems.extend(_conflicts(recipe, layers))
    for path, settings in _regime_sections(value) if checked else ():
        try:
            get_regime(value["regime"]["name"])(**settings)
        except ValidationError as error:
            problems.extend(line for line in _explain(error, layers, path, regime) if line not in problems)
    if problems or recipe is None:
        raise RecipeError(problems)
    return recipe


def _key_user_regimes_by_name(section: Layer) -> None:
    """Rekey the settings of the user's regimes in a list from import path to name."""
    for part in parts_of(section["name"]):
        if is_open(part) and part in section:
            section[get_regime(part).name] = section.pop(part)


def _conflicts(recipe: Recipe, layers: Layers) -> list[str]:
    """Return problems with settings that are valid alone but not together, e.g. those that bias the regime's ratios or
    advantages."""
    regime_class = recipe.regime_class
    try:
        schema = recipe.published
    except ValidationError:
        return []  # the regime's settings are invalid, which is reported separately
    traced = schema.traced
    lines = []
    first = recipe.policies[0].name
    if regime_class.reads_peers and len(recipe.policies) < 2 and not recipe.sources_of(first):
        lines.append(
            f"regime {regime_class.name!r} shares between policies, but this pool has one ({first!r}); add a policy, "
            + ("or a source to learn from: --source NAME=recorded:FILE, " if regime_class.accepts_sources else "")
            + f"or use --regime {baseline().name}"
        )
    lines += _source_problems(recipe, layers)
    if recipe.task.has_turns and ("text" in schema.fields or recipe.run.publish == "full"):
        publisher = f"regime {regime_class.name!r}" if "text" in schema.fields else "run.publish: full"
        key = "tools" if recipe.task.environment is None else "environment"
        unshared = f"{publisher} shares texts, not rollouts of several turns: {NOT_SHARED}"
        lines.append(_line(layers, ("task", key), unshared))
    if recipe.task.has_turns and regime_class.requests_samples:
        key = "tools" if recipe.task.environment is None else "environment"
        lines.append(_line(layers, ("task", key), f"regime {regime_class.name!r} {NO_TURNS}"))
    for policy in recipe.policies:
        problem = recipe.regime_of(policy.name).staleness_problem(recipe.exchange.staleness)
        if problem is not None:
            lines.append(_line(layers, ("exchange", "staleness"), problem))
            break
    for index, policy in enumerate(recipe.policies):
        settings = recipe.trainer_settings(policy.name)
        problems = [*ratio_problems(settings, traced=traced or recipe.regime_of(policy.name).uses_ratios())]
        problems += aggregation_problem(settings, moves_advantages=recipe.regime_of(policy.name).changes_advantages())
        problems += recipe.regime_of(policy.name).problems(settings)
        for key, problem in recipe.regime_of(policy.name).ineffective_settings():
            overridden = key in flat(policy.regime or {})
            section = ("policies", str(index), "regime") if overridden else ("regime",)
            lines.append(_line(layers, (*section, *key.split(".")), problem))
        lora = recipe.lora_settings(policy.name)
        if quantization(settings) and lora is None:
            problem = "quantization_config: quantized weights are not trained; expected an adapter (lora: {r: 16})"
            problems.append(("model_init_kwargs", problem))
        published = traced or recipe.run.publish == "full"
        if published and lora is not None and lora.dropout > 0 and not settings.get("use_vllm"):
            publisher = f"regime {regime_class.name!r}" if traced else "run.publish: full"
            problem = (
                f"found {lora.dropout}; TRL samples with dropout, so the traces that {publisher} publishes would come "
                "from a different policy; expected 0"
            )
            lines.append(_line(layers, ("lora", "dropout"), problem))
        for key, problem in problems:
            keys = key.split(".")
            section = ("policies", str(index), "trainer") if keys[0] in policy.trainer else ("trainer",)
            lines.append(_line(layers, (*section, *keys), problem))
    whitening = regime_class.whitening_problem(whiten=recipe.round.whiten_advantages)
    lines += [_line(layers, ("round", "whiten_advantages"), problem) for problem in whitening]
    lines += server_problems({p.name: recipe.trainer_settings(p.name) for p in recipe.policies})
    return list(dict.fromkeys(lines))


def _source_problems(recipe: Recipe, layers: Layers) -> list[str]:
    """Return why a policy's regime cannot use the sources that it reads, or lacks one."""
    lines = []
    for policy in recipe.policies:
        regime, sources = recipe.regime_of(policy.name), recipe.sources_of(policy.name)
        if regime.needs_source() and not sources:
            lines.append(
                _line(
                    layers,
                    ("regime",),
                    f"{regime.describe()} learns a source's texts, and policy {policy.name!r} reads none; add one: "
                    "--source NAME=recorded:FILE (recorded:task: the solutions in the task's data)",
                )
            )
        for source in sources:
            problem = regime.source_problem(source.traits) or _frozen_problem(recipe, source, regime)
            if problem is not None:
                lines.append(_line(layers, ("sources",), f"{source.name!r}: {problem}"))
    for source in recipe.asked_sources:
        if recipe.bucket is not None:
            lines.append(
                _line(
                    layers,
                    ("sources",),
                    f"{source.name!r}: found a {source.kind} source and exchange.url, expected one of them: a source "
                    "is asked by a process beside the policies, on one machine",
                )
            )
        if source.timeout >= recipe.run.step_timeout:
            problem = f"{source.name!r}: found timeout {source.timeout:g}, expected less than run.step_timeout"
            lines.append(
                _line(layers, ("sources",), f"{problem} ({recipe.run.step_timeout:g}), after which it is dead")
            )
    return list(dict.fromkeys(lines))


#: TRL's settings of sampling that a frozen source does not have, with the values that mean none
_SAMPLING: Settings = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0,)}


def _frozen_problem(recipe: Recipe, source: SourceSection, regime: Regime) -> str | None:
    """Return why a frozen source cannot be sampled as the run samples, where that matters; None if it can."""
    if source.kind != "frozen":
        return None
    settings = recipe.trainer_settings(recipe.readers_of(source)[0])
    for key, values in _SAMPLING.items():
        if key in settings and settings[key] not in values:
            return f"a frozen source samples without {key}; found trainer.{key}: {settings[key]}, expected {values[0]}"
    differs = {
        "temperature": (source.temperature, settings.get("temperature", 1.0)),
        "max_tokens": (source.max_tokens, settings.get("max_completion_length", 256)),
    }
    for key, (own, runs) in differs.items():
        if "logprobs" in regime.publishes().fields and own is not None and own != runs:
            return (
                f"regime {regime.name!r} weighs its tokens by the run's sampling; found {key}: {own}, the run has "
                f"{runs}; leave it out"
            )
    return None


def _regime_sections(value: Layer) -> list[tuple[tuple[str, ...], Layer]]:
    """Return the regime's common settings, then those of each policy that overrides some."""
    common = {str(key): setting for key, setting in value["regime"].items() if key != "name"}
    sections: list[tuple[tuple[str, ...], Layer]] = [(("regime",), common)]
    policies = value.get("policies")
    for index, policy in enumerate(policies if isinstance(policies, list) else []):
        if isinstance(policy, dict) and isinstance(policy.get("regime"), dict) and policy["regime"]:
            sections.append((("policies", str(index), "regime"), merged(common, policy["regime"])))
    return sections


def _check_names(value: Layer, layers: Layers, problems: list[str], *, run_code: bool) -> None:
    """Report unknown tasks and regimes; with `run_code` import user code, else accept its names."""
    lookups: tuple[tuple[str, Callable[[str], object], list[str]], ...] = (
        ("task", get_task, list(TASKS)),
        ("regime", get_regime, list(regimes())),
    )
    for key, get, known in lookups:
        name = value[key].get("name")
        if name in known or (isinstance(name, str) and not run_code):
            continue
        if not isinstance(name, str):
            problems.append(_line(layers, (key, "name"), f"found {name!r}, expected {_one_of(known, str(name))}"))
            continue
        try:
            get(name)
        except (RegimeError, TaskError):
            if is_import_path(name) or name in entry_points(f"mutualrl.{key}s") or is_combined(name):
                raise
            problems.append(_line(layers, (key, "name"), f"found {name!r}, expected {_one_of(known, name)}"))
    if problems:
        raise RecipeError(problems)


def _trainer_sections(value: Layer) -> list[tuple[tuple[str, ...], Layer]]:
    sections: list[tuple[tuple[str, ...], object]] = [(("trainer",), value.get("trainer"))]
    policies = value.get("policies")
    for index, policy in enumerate(policies if isinstance(policies, list) else []):
        if isinstance(policy, dict):
            sections.append((("policies", str(index), "trainer"), policy.get("trainer")))
    return [(path, section) for path, section in sections if isinstance(section, dict)]


def _with_round(value: Layer) -> Layer:
    """Return `value` with the default number of prompts per round, unless TRL's batching keys are set."""
    trainer, round_section = value.get("trainer"), value.get("round", {})
    if not isinstance(trainer, dict) or not isinstance(round_section, dict) or round_section.get("prompts") is not None:
        return value
    if any(key in settings for _, settings in _trainer_sections(value) for key in TRL_BATCHING_KEYS):
        return value
    return {**value, "round": {**round_section, "prompts": DEFAULT_PROMPTS}}


def _explain(error: ValidationError, layers: Layers, prefix: tuple[str, ...], regime: type[Regime] | None) -> list[str]:
    lines = []
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "too_short" and len(details) > 1:
            continue  # the count excludes invalid items, which have their own errors
        path = (*prefix, *(str(part) for part in detail["loc"]))
        lines.append(_line(layers, path, _expectation(detail, path, regime)))
    return lines


def _expectation(detail: ErrorDetails, path: tuple[str, ...], regime: type[Regime] | None) -> str:
    if detail["type"] == "extra_forbidden":
        keys = _keys_at(path[:-1], regime)
        return f"unknown key; expected {_one_of(keys, path[-1])}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] in ("value_error", "missing"):
        return message
    return f"found {detail['input']!r:.80}; {message[:1].lower()}{message[1:]}"


def _keys_at(path: tuple[str, ...], regime: type[Regime] | None) -> list[str]:
    """Return the keys allowed at a path. `regime`: its class; None if its code may not be run."""
    if not path:
        return list(Recipe.model_fields)
    if path[0] == "regime" or (path[0] == "policies" and path[2:3] == ("regime",)):
        return _regime_keys(path[1:] if path[0] == "regime" else path[3:], regime)
    if path[0] == "policies":
        return list(Policy.model_fields)
    if path[0] == "sources":
        return list((SourceColumns if path[2:3] == ("columns",) else SourceSection).model_fields)
    return list(_SECTIONS[path[0]].model_fields) if path[0] in _SECTIONS else []


def _regime_keys(path: tuple[str, ...], regime: type[Regime] | None) -> list[str]:
    """Return the keys of a regime's settings, or of one regime in a list under its name."""
    if regime is None:
        return ["name"]
    part = regime.model_fields.get(path[0]) if path else None
    if part is not None and isinstance(part.annotation, type) and issubclass(part.annotation, Regime):
        return list(part.annotation.model_fields)
    return ["name", *regime.model_fields]


def _one_of(known: list[str], found: str) -> str:
    near = difflib.get_close_matches(found, known, n=1)
    return f"one of: {', '.join(known)}" + (f" (did you mean '{near[0]}'?)" if near else "")


def _line(layers: Layers, path: tuple[str, ...], problem: str) -> str:
    source = redacted(layers.source_of(path) or "")
    key = ".".join(path)
    return f"{f'{source}: ' if source else ''}{f'{key}: ' if key else ''}{problem}"


def dump(recipe: Recipe) -> str:
    """Return a resolved recipe as YAML; `load` reads back the same recipe."""
    value = recipe.model_dump(mode="json", exclude_none=True)
    for policy, section in zip(recipe.policies, value["policies"], strict=True):
        if recipe.lora is not None and recipe.lora_settings(policy.name) is None:
            section["lora"] = None
    if not recipe.sources:
        del value["sources"]
    for source, section in zip(recipe.sources, value.get("sources", ()), strict=True):
        for key in [key for key in section if source.kind not in KEYS_OF.get(key, (source.kind,))]:
            del section[key]
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
        return Recipe.model_validate(layers.value)
    except ValidationError as error:
        raise RecipeError(_explain(error, layers, (), None)) from None


def load_run(run: RunDirectory, *, without_models: bool = False, run_code: bool = False) -> Recipe:
    """Return the recipe of a run. With `run_code` the user's regime and task are imported, as for a resumption; without
    it, as for commands that only inspect a run, none of its code is executed. With `without_models` a missing model
    directory (of a run made on another machine) is replaced by `gone/NAME`. Raises RecipeError, and as
    `RunDirectory.recipe_text` does."""
    layers = Layers()
    layers.add_text(run.recipe_text(), run.recipe)
    hardware = layers.value.get("hardware")
    if isinstance(hardware, dict):
        hardware.pop("note", None)  # v0.1 kept a remark there
    for policy in layers.value.get("policies") or () if without_models else ():
        model = Path(str(policy.get("model")))
        if model.is_absolute() and not model.is_dir():
            policy["model"] = f"{GONE}{policy.get('name')}"
    if not run_code:
        _replace_gold(layers.value)
    return validate(layers, run_code=run_code)


def _replace_gold(value: Layer) -> None:
    """Replace `teacher: gold` of version 0.2, which had no sources, so that its runs can be read."""
    sections = [value.get("regime"), *(policy.get("regime") for policy in value.get("policies") or ())]
    sections += [part for section in sections if isinstance(section, dict) for part in section.values()]
    golden = [section for section in sections if isinstance(section, dict) and section.get("teacher") == "gold"]
    for section in sections if golden else ():
        if isinstance(section, dict):
            section.pop("solution", None)
    for section in golden:
        section["teacher"] = "source"
    if golden:
        value["sources"] = [{"name": "gold", "recorded": "task"}]
