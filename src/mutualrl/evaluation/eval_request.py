"""Request of an evaluation, checked before any model is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mutualrl.engines.base import Sampling, check_temperature
from mutualrl.errors import UsageError
from mutualrl.evaluation.flags import EvalFlags
from mutualrl.process.limits import REWARD_SECONDS
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.recipes.schema import Policy, TaskSection
from mutualrl.recipes.section import known_model
from mutualrl.recipes.yaml_file import parse_mapping
from mutualrl.records import POLICY_NAME, Prompt
from mutualrl.storage.files import user_path
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import trained_model
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.base import sample_evenly
from mutualrl.tasks.hub_data import data_path
from mutualrl.tasks.mixture import PAPER, MixtureTask
from mutualrl.tasks.rewarding import BOXED
from mutualrl.tasks.turns import require_one_turn

ALIASES = {"paper": PAPER}


@dataclass(frozen=True)
class TaskRequest:
    """Prompts of a task, their origin, the dropped rows, and the rewards of a completion. `step_timeout`: limit in
    seconds of a reward function on the completions of a part."""

    name: str
    prompts: list[Prompt]
    origin: str
    dropped: tuple[str, ...]
    max_new_tokens: int
    rewards: tuple[str, ...] = BOXED
    reward_weights: tuple[float, ...] | None = None
    step_timeout: float = REWARD_SECONDS


@dataclass(frozen=True)
class ModelRequest:
    """Named model, and how to load and prompt it."""

    name: str
    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    template: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class EvalRequest:
    """Tasks, models and decoding settings. `engine`: None to choose one per model. `initial`: the models of a run as
    they were before training."""

    suite: str
    tasks: list[TaskRequest]
    models: list[ModelRequest]
    sampling: Sampling
    engine: str | None
    batch_size: int
    also: tuple[str, ...]
    initial: bool = False

    @classmethod
    def of(cls, flags: EvalFlags) -> EvalRequest:
        """Build the request from the flags; the task and completion limit of a run or pool are the defaults.

        Raises UsageError, RecipeError or DataError naming what was expected.
        """
        targets = [flags.run is not None, bool(flags.models), flags.pool is not None]
        if sum(targets) != 1:
            raise UsageError("name what to evaluate: either --run DIR, or --model PATH (once or more), or --pool NAME")
        if flags.initial and flags.run is None:
            raise UsageError("--initial: only a run has models before and after training; add --run DIR")
        sampling = _sampling(flags)
        recipe = {} if flags.run is None else _recipe_of(RunDirectory(user_path(flags.run)))
        pool = None if flags.pool is None else resolve(Request(pool=flags.pool))
        pool_task = pool.task if pool is not None else TaskSection()
        section = _section(recipe, flags) if recipe else pool_task
        suite = flags.suite or section.name
        trainer = pool.trainer if pool is not None else recipe.get("trainer") or {}
        recipe_tokens = trainer.get("max_completion_length") if suite == section.name else None
        tokens = flags.max_new_tokens or recipe_tokens  # other tasks have their own limits
        weights = _get(recipe, "trainer", "reward_weights") if recipe else pool and pool.trainer.get("reward_weights")
        tasks = [
            replace(_rewarded(task, section, weights), step_timeout=flags.step_timeout)
            for task in _tasks(suite, section, flags, tokens)
        ]
        if flags.run is not None and flags.initial:
            models = _initial_models(recipe, flags.trust_remote_code)
        elif flags.run is not None:
            models = _models_of(RunDirectory(user_path(flags.run)), recipe, flags.trust_remote_code)
        elif pool is not None:
            models = [_of_policy(pool, p, flags.trust_remote_code) for p in pool.policies]
        else:
            models = _named(flags.models, flags.trust_remote_code)
        return cls(suite, tasks, models, sampling, flags.engine, flags.batch_size, flags.also, flags.initial)


def _rewarded(task: TaskRequest, section: TaskSection, weights: Any) -> TaskRequest:
    """Return a task with the rewards of the recipe, if it is the recipe's own task."""
    if task.name != section.name:
        return task
    require_one_turn(section.environment, section.tools, "mutualrl eval")
    if section.reward == task.rewards:
        return task
    reward_weights = tuple(float(w) for w in weights) if isinstance(weights, list) else None
    return replace(task, rewards=section.reward, reward_weights=reward_weights)


def _sampling(flags: EvalFlags) -> Sampling:
    samples = flags.samples or 1
    check_temperature(flags.temperature)
    default_temperature = 1.0 if samples > 1 else 0.0
    temperature = default_temperature if flags.temperature is None else flags.temperature
    if samples > 1 and temperature == 0:
        raise UsageError(f"--samples {samples} at --temperature 0 are {samples} identical ones; expected more than 0")
    return Sampling(0, temperature=temperature, samples=samples, seed=flags.seed)


def suite_of(text: str) -> list[str]:
    """Return the tasks of `--suite`: comma-separated names; `paper` is the paper's seven. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"--suite {text!r}: expected comma-separated task names, such as math,arc")
    members = [member for name in names for member in ALIASES.get(name, (name,))]
    for name in members:
        get_task(name)
    return list(dict.fromkeys(members))


def _tasks(suite: str, section: TaskSection, flags: EvalFlags, tokens: int | None) -> list[TaskRequest]:
    names = suite_of(suite)
    if flags.data is not None and flags.data_dir is not None:
        raise UsageError("--data is for the rows of one task, --data-dir for a directory with several; give one")
    if flags.data is not None and len(names) > 1:
        raise UsageError(f"--data is for the rows of one task, --suite {suite} has {len(names)}; use --data-dir DIR")
    if flags.template is not None or flags.answer is not None:
        if "dataset" not in names:
            raise UsageError(f"--template and --answer apply to task 'dataset'; the suite is {suite}")
        if flags.data is None and flags.data_dir is None:
            raise UsageError("--template and --answer apply to rows of a file: name it with --data")
        if flags.answer == "":
            raise UsageError("--answer: expected the name of a field")
    location = flags.data or flags.data_dir
    data = None if location is None else Path(data_path(location))
    if flags.data_dir is not None and data is not None and not data.is_dir():
        raise UsageError(f"--data-dir {flags.data_dir}: expected a directory with the tasks' files")
    results: list[TaskRequest] = []
    for name in names:
        if name == section.name and data is None:
            source = section.source(flags.seed)
        else:
            takes_data = get_task(name).takes_data or flags.data is not None
            source = TaskSource(
                None, data if takes_data else None, flags.seed, flags.template, flags.answer or "answer"
            )
        task = get_task(name)
        if isinstance(task, MixtureTask):
            results += _members(task, source, flags, tokens)
        else:
            results.append(_task(name, source, flags, tokens))
    return list({task.name: task for task in reversed(results)}.values())[::-1]


def _members(mixture: MixtureTask, source: TaskSource, flags: EvalFlags, tokens: int | None) -> list[TaskRequest]:
    """Return one request per member of a mixture."""
    return [_task(name, m.source, flags, tokens) for name, (_, m) in mixture.members(source).items()]


def _task(name: str, source: TaskSource, flags: EvalFlags, tokens: int | None) -> TaskRequest:
    task = get_task(name)
    data = task.read("validation", source)
    if not data.prompts:
        raise UsageError(f"task {name!r}: {data.origin} has no rows to evaluate on (too few to hold any out)")
    prompts = data.prompts if flags.limit is None else sample_evenly(data.prompts, flags.limit)
    limit, rewards = tokens or task.max_new_tokens, getattr(task, "reward", BOXED)
    return TaskRequest(name, prompts, data.origin, data.dropped, limit, tuple(rewards))


def _recipe_of(run: RunDirectory) -> dict[str, Any]:
    """Return a run's recipe as stored. Its base models may no longer exist; only the trained ones are needed."""
    recipe = parse_mapping(run.recipe_text(), str(run.recipe))
    policies = recipe.get("policies")
    entries = policies if isinstance(policies, list) else []
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    if not names or not all(isinstance(name, str) and re.match(POLICY_NAME, name) for name in names):
        raise UsageError(f"{run.recipe} is damaged: expected `policies:`, each named, found {repr(policies)[:80]}")
    tokens = _get(recipe, "trainer", "max_completion_length")
    if not isinstance(_get(recipe, "task", "name"), str) or not isinstance(tokens, int):
        raise UsageError(f"{run.recipe} is damaged: expected task.name and trainer.max_completion_length")
    return recipe


def _section(recipe: dict[str, Any], flags: EvalFlags) -> TaskSection:
    try:
        return TaskSection.model_validate(recipe["task"])
    except ValidationError as error:
        raise UsageError(f"{flags.run}: its recipe's task section is damaged: {error.errors()[0]['msg']}") from None


def _get(recipe: dict[str, Any], section: str, key: str) -> Any:
    value = recipe.get(section)
    return value.get(key) if isinstance(value, dict) else None


def _models_of(run: RunDirectory, recipe: dict[str, Any], trust_remote_code: bool) -> list[ModelRequest]:
    """Return the trained models of a run, by policy. Raises UsageError when one is missing, FileDamagedError when one
    belongs to another policy or run."""
    results = []
    for policy in recipe["policies"]:
        path = trained_model(run, policy["name"], verify=True)
        template = _template(recipe, policy)
        results.append(ModelRequest(policy["name"], str(path), None, trust_remote_code, template))
    return results


def _initial_models(recipe: dict[str, Any], trust_remote_code: bool) -> list[ModelRequest]:
    """Return the models with which a run's policies began, by policy."""
    results = []
    for policy in recipe["policies"]:
        name, model, revision = policy["name"], policy.get("model"), policy.get("revision")
        try:
            path = known_model(str(model))
        except ValueError as error:
            raise UsageError(f"--initial: the model of policy {name!r} before training, {model!r}: {error}") from None
        trust = bool(policy.get("trust_remote_code")) or trust_remote_code
        results.append(ModelRequest(name, path, revision, trust, _template(recipe, policy)))
    return results


def _template(recipe: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    template = _get(policy, "trainer", "chat_template_kwargs") or _get(recipe, "trainer", "chat_template_kwargs")
    return template if isinstance(template, dict) else {}


def _of_policy(pool: Recipe, policy: Policy, trust_remote_code: bool) -> ModelRequest:
    trust = policy.trust_remote_code or trust_remote_code
    template = pool.trainer_settings(policy.name).get("chat_template_kwargs") or {}
    return ModelRequest(policy.name, policy.model, policy.revision, trust, dict(template))


def _named(models: tuple[str, ...], trust_remote_code: bool) -> list[ModelRequest]:
    named = {}
    for model in models:
        try:
            named[model] = ModelRequest(model, known_model(model), None, trust_remote_code)
        except ValueError as error:
            raise UsageError(f"--model {model}: {error}") from None
    return list(named.values())
