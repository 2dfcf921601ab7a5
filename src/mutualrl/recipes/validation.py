"""Validate the merged layers of a recipe, and explain every problem with its source."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mutualrl.engines.model_files import model_problem
from mutualrl.errors import RecipeError, RegimeError, TaskError
from mutualrl.process.plugins import entry_points, is_import_path
from mutualrl.recipes.batch_plan import TRL_BATCHING_KEYS
from mutualrl.recipes.layers import Layer, Layers
from mutualrl.recipes.schema import (
    HardwareSection,
    LaunchSection,
    LoraSection,
    Policy,
    Recipe,
    RoundSection,
    RunSection,
)
from mutualrl.recipes.servers import server_problems
from mutualrl.recipes.trainer_keys import quantization, sharding_problems, validate_trainer_key
from mutualrl.recipes.trainer_table import Settings
from mutualrl.regimes import (
    Regime,
    baseline,
    get_regime,
    is_combined,
    is_open,
    parts_of,
    regimes,
)
from mutualrl.regimes.regime import flat, merged
from mutualrl.regimes.run_problems import RunFacts, member_problems, setting_problems
from mutualrl.see.section import ExchangeSection
from mutualrl.sources.section import KEYS, KINDS, Columns, FrozenSource, ServedSource, SourceSection
from mutualrl.storage.bucket_url import redacted
from mutualrl.tasks import TASKS, get_task
from mutualrl.tasks.section import TaskSection

DEFAULT_PROMPTS = 8

_SECTIONS: dict[str, type[BaseModel]] = {
    "task": TaskSection,
    "round": RoundSection,
    "run": RunSection,
    "hardware": HardwareSection,
    "launch": LaunchSection,
    "lora": LoraSection,
    "exchange": ExchangeSection,
}


def validate(layers: Layers, *, run_code: bool = True, models: bool = True) -> Recipe:
    """Validate the merged layers. Raises RecipeError with every problem found, RegimeError for a regime that cannot be
    imported. Without `run_code`, regimes and tasks outside this package are neither imported nor checked; without
    `models`, models need not exist."""
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
        problems.extend(explain(error, layers, (), regime))
    problems += model_problems(layers) if models else []
    if recipe is not None and not problems and checked:
        problems.extend(_conflicts(recipe, layers))
    for path, settings in _regime_sections(value) if checked else ():
        try:
            get_regime(value["regime"]["name"])(**settings)
        except ValidationError as error:
            problems.extend(line for line in explain(error, layers, path, regime) if line not in problems)
    if problems or recipe is None:
        raise RecipeError(problems)
    return recipe


def model_problems(layers: Layers) -> list[str]:
    """Return a line for each model that this machine lacks: no directory of a model, and no hub id."""
    lines = []
    for room, key in (("policies", "model"), ("sources", "frozen")):
        items = layers.value.get(room)
        for index, item in enumerate(items if isinstance(items, list) else []):
            model = item.get(key) if isinstance(item, dict) else None
            if isinstance(model, str) and (problem := model_problem(model)) is not None:
                lines.append(_line(layers, (room, str(index), key), problem))
    return lines


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
    lines += _member_problems(recipe, layers)
    for index, policy in enumerate(recipe.policies):
        settings = recipe.trainer_settings(policy.name)
        facts = RunFacts(
            trainer=settings,
            traced=traced,
            whiten=recipe.round.whiten_advantages,
            staleness=recipe.exchange.staleness,
            turns=recipe.task.has_turns,
            resample=recipe.round.resample is not None,
        )
        problems = []
        for where, problem in setting_problems(recipe.regime_of(policy.name), facts):
            room, _, key = where.partition(".")
            if room == "trainer":
                problems.append((key, problem))
            elif room == "regime":
                overridden = key in flat(policy.regime or {})
                section = ("policies", str(index), "regime") if overridden else ("regime",)
                lines.append(_line(layers, (*section, *key.split(".")), problem))
            elif room == "turns":
                lines.append(_line(layers, ("task", "environment" if recipe.task.environment else "tools"), problem))
            else:
                lines.append(_line(layers, ("exchange" if room == "staleness" else "round", room), problem))
        weights, count = settings.get("reward_weights"), len(recipe.task.reward)
        if weights is not None and recipe.task.environment is None and len(weights) != count:
            names = ", ".join(recipe.task.reward)
            problem = f"found {len(weights)} weights, expected one per reward function: {count} ({names})"
            problems.append(("reward_weights", problem))
        problems += sharding_problems(settings, recipe.launch.strategy)
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
    lines += server_problems({p.name: recipe.trainer_settings(p.name) for p in recipe.policies})
    return list(dict.fromkeys(lines))


def _member_problems(recipe: Recipe, layers: Layers) -> list[str]:
    """Return why a policy's regime cannot use the members that it reads, or lacks one."""
    lines = []
    for policy in recipe.policies:
        regime, sources = recipe.regime_of(policy.name), recipe.sources_of(policy.name)
        traits = {source.name: source.traits for source in sources}
        problems = dict(member_problems(regime, RunFacts(peers=len(recipe.policies) - 1, sources=traits)))
        if "peers" in problems:
            other = "or a source to learn from: --source NAME=recorded:FILE, " if regime.needs().selections else ""
            lines.append(
                f"{problems['peers']} ({policy.name!r}); add a policy, {other}or use --regime {baseline().name}"
            )
        if "sources" in problems:
            recorded = "recorded:FILE (recorded:task: the solutions in the task's data)"
            kind = "frozen:MODEL" if regime.needs().scores else recorded
            problem = f"{problems['sources']} for policy {policy.name!r}; add one: --source NAME={kind}"
            lines.append(_line(layers, ("regime",), problem))
        for each in sources:
            unusable = problems.get(f"sources.{each.name}") or _frozen_problem(recipe, each, regime)
            if unusable is not None:
                lines.append(_line(layers, ("sources",), f"{each.name!r}: {unusable}"))
    for source in recipe.asked_sources:
        if recipe.task.environment is not None:
            problem = (
                f"{source.name!r}: found a {source.kind} source, whose answers have one turn, which "
                f"{recipe.task.environment} cannot judge; expected recorded runs (recorded: FILE)"
            )
            lines.append(_line(layers, ("sources",), problem))
        if isinstance(source, ServedSource) and source.timeout >= recipe.run.step_timeout:
            problem = f"{source.name!r}: found timeout {source.timeout:g}, expected less than run.step_timeout"
            lines.append(
                _line(layers, ("sources",), f"{problem} ({recipe.run.step_timeout:g}), after which it is dead")
            )
    return list(dict.fromkeys(lines))


#: TRL's settings of sampling that a frozen source does not have, with the values that mean none
_SAMPLING: Settings = {"top_p": (1.0, None), "top_k": (0, -1, None), "min_p": (0.0, None), "repetition_penalty": (1.0,)}


def _frozen_problem(recipe: Recipe, source: SourceSection, regime: Regime) -> str | None:
    """Return why a frozen source cannot be sampled as the run samples, where that matters; None if it can."""
    if not isinstance(source, FrozenSource):
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
        if "logprobs" in regime.needs().reads.fields and own is not None and own != runs:
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


def explain(error: ValidationError, layers: Layers, prefix: tuple[str, ...], regime: type[Regime] | None) -> list[str]:
    """Return a line per problem that pydantic found: where the value is from, and what was expected."""
    lines = []
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "too_short" and len(details) > 1:
            continue  # the count excludes invalid items, which have their own errors
        path = (*prefix, *_keys(detail["loc"]))
        lines.append(_line(layers, path, _expectation(detail, path, regime)))
    return lines


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that lead to a value. pydantic names a source's kind after its place in the list."""
    parts = [str(part) for part in location]
    return parts[:2] + parts[3:] if parts[:1] == ["sources"] and parts[2:3] and parts[2] in KINDS else parts


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
        return list(Columns.model_fields if path[2:3] == ("columns",) else KEYS)
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
