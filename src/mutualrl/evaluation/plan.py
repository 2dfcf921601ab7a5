"""Plan of an evaluation: its tasks, models and settings, checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from mutualrl.engines.model_files import known_model
from mutualrl.engines.sampling import Sampling
from mutualrl.errors import UsageError
from mutualrl.evaluation.request import EvalRequest
from mutualrl.process.limits import REWARD_SECONDS
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.recipes.schema import Policy
from mutualrl.records import Prompt
from mutualrl.references import data_path
from mutualrl.runs.read import part, read_run
from mutualrl.runs.record import Run, policies_in
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import trained_model
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.base import TurnsSpec, sample_evenly
from mutualrl.tasks.mixture import PAPER, MixtureTask
from mutualrl.tasks.rewarding import BOXED
from mutualrl.tasks.section import TaskSection

ALIASES = {"paper": PAPER}


@dataclass(frozen=True)
class EvalTask:
    """Prompts of a task, their origin, the dropped rows, and the rewards of a completion. `step_timeout`: limit in
    seconds of a reward function on the completions of a part. `turns`: tools and environment of its rollouts."""

    name: str
    prompts: list[Prompt]
    origin: str
    dropped: tuple[str, ...]
    max_new_tokens: int
    rewards: tuple[str, ...] = BOXED
    reward_weights: tuple[float, ...] | None = None
    step_timeout: float = REWARD_SECONDS
    turns: TurnsSpec | None = None


@dataclass(frozen=True)
class EvalModel:
    """Named model, and how to load and prompt it."""

    name: str
    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    template: JsonObject = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class EvalPlan:
    """What a request evaluates. `sampling`: with the length of no task, which each has itself."""

    request: EvalRequest
    suite: str
    tasks: list[EvalTask]
    models: list[EvalModel]
    sampling: Sampling


def plan_evaluation(request: EvalRequest) -> EvalPlan:
    """Check a request; the task and completion limit of a run or pool are the defaults.

    Raises UsageError, RecipeError or DataError naming what was expected.
    """
    targets = [request.run is not None, bool(request.models), request.pool is not None]
    if sum(targets) != 1:
        raise UsageError("name what to evaluate: either --run DIR, or --model PATH (once or more), or --pool NAME")
    if request.initial and request.run is None:
        raise UsageError("--initial: only a run has models before and after training; add --run DIR")
    several = (request.sampling.samples or 1) > 1
    sampling = request.sampling.sampling(samples=1, max_new_tokens=0, temperature=1.0 if several else 0.0)
    run = None if request.run is None else _run(request.run)
    pool = None if request.pool is None else resolve(Request(pool=request.pool))
    pool_task = pool.task if pool is not None else TaskSection()
    section = pool_task if run is None else _section(run)
    suite = request.suite or section.name
    trainer = pool.trainer if pool is not None else {} if run is None else run.section("trainer")
    recipe_tokens = trainer.get("max_completion_length") if suite == section.name else None
    tokens = request.sampling.max_new_tokens or recipe_tokens  # other tasks have their own limits
    tasks = [
        replace(_rewarded(task, section, trainer), step_timeout=request.step_timeout)
        for task in _tasks(suite, section, request, tokens)
    ]
    if run is not None and request.initial:
        models = _initial_models(run, request.trust_remote_code)
    elif run is not None:
        models = _models_of(run, request.trust_remote_code)
    elif pool is not None:
        models = [_of_policy(pool, p, request.trust_remote_code) for p in pool.policies]
    else:
        models = _named(request.models, request.trust_remote_code)
    return EvalPlan(request, suite, tasks, models, sampling)


def _rewarded(task: EvalTask, section: TaskSection, trainer: Mapping[str, object]) -> EvalTask:
    """Return a task with the rewards of the recipe, if it is the recipe's own task."""
    if task.name != section.name:
        return task
    iterations = trainer.get("max_tool_calling_iterations")
    if section.turns is not None:
        most = iterations if isinstance(iterations, int) else None
        task = replace(task, turns=section.turns._replace(iterations=most))
    if section.reward == task.rewards:
        return task
    weights = trainer.get("reward_weights")
    reward_weights = tuple(float(w) for w in weights) if isinstance(weights, list) else None
    return replace(task, rewards=section.reward, reward_weights=reward_weights)


def suite_of(text: str) -> list[str]:
    """Return the tasks of `--suite`: comma-separated names; `paper` is the paper's seven. Raises UsageError."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"--suite {text!r}: expected comma-separated task names, such as math,arc")
    members = [member for name in names for member in ALIASES.get(name, (name,))]
    for name in members:
        get_task(name)
    return list(dict.fromkeys(members))


def _tasks(suite: str, section: TaskSection, request: EvalRequest, tokens: int | None) -> list[EvalTask]:
    names = suite_of(suite)
    if request.rows.data is not None and request.data_dir is not None:
        raise UsageError("--data is for the rows of one task, --data-dir for a directory with several; give one")
    if request.rows.data is not None and len(names) > 1:
        raise UsageError(f"--data is for the rows of one task, --suite {suite} has {len(names)}; use --data-dir DIR")
    if request.rows.template is not None or request.rows.answer is not None:
        if "dataset" not in names:
            raise UsageError(f"--template and --answer apply to task 'dataset'; the suite is {suite}")
        if request.rows.data is None and request.data_dir is None:
            raise UsageError("--template and --answer apply to rows of a file: name it with --data")
        if request.rows.answer == "":
            raise UsageError("--answer: expected the name of a field")
    location = request.rows.data or request.data_dir
    data = None if location is None else Path(data_path(location))
    if request.data_dir is not None and data is not None and not data.is_dir():
        raise UsageError(f"--data-dir {request.data_dir}: expected a directory with the tasks' files")
    results: list[EvalTask] = []
    for name in names:
        if name == section.name and data is None:
            source = section.source(request.sampling.seed)
        else:
            takes_data = get_task(name).takes_data or request.rows.data is not None
            source = TaskSource(
                None,
                data if takes_data else None,
                request.sampling.seed,
                request.rows.template,
                request.rows.answer or "answer",
            )
        task = get_task(name)
        if isinstance(task, MixtureTask):
            results += _members(task, source, request, tokens)
        else:
            results.append(_task(name, source, request, tokens))
    return list({task.name: task for task in reversed(results)}.values())[::-1]


def _members(mixture: MixtureTask, source: TaskSource, request: EvalRequest, tokens: int | None) -> list[EvalTask]:
    """Return one request per member of a mixture."""
    return [_task(name, m.source, request, tokens) for name, (_, m) in mixture.members(source).items()]


def _task(name: str, source: TaskSource, request: EvalRequest, tokens: int | None) -> EvalTask:
    task = get_task(name)
    data = task.read("validation", source)
    if not data.prompts:
        raise UsageError(f"task {name!r}: {data.origin} has no rows to evaluate on (too few to hold any out)")
    prompts = data.prompts if request.limit is None else sample_evenly(data.prompts, request.limit)
    limit, rewards = tokens or task.max_new_tokens, getattr(task, "reward", BOXED)
    return EvalTask(name, prompts, data.origin, data.dropped, limit, tuple(rewards))


def _run(path: Path) -> Run:
    """Return a run whose recipe says what to evaluate. Its base models may no longer exist; only the trained ones are
    needed."""
    run = read_run(path)
    policies = run.recipe.get("policies")
    named = policies_in(run.recipe)
    if not named or not isinstance(policies, list) or len(named) < len(policies):
        raise UsageError(f"{path}: its recipe is damaged: expected `policies:`, each named, found {policies!r:.80}")
    if not isinstance(run.setting("task.name"), str) or not isinstance(run.setting(TOKENS), int):
        raise UsageError(f"{path}: its recipe is damaged: expected task.name and {TOKENS}")
    return run


TOKENS = "trainer.max_completion_length"


def _section(run: Run) -> TaskSection:
    try:
        return TaskSection.model_validate(run.section("task"))
    except ValidationError as error:
        raise UsageError(f"{run.root}: its recipe's task section is damaged: {error.errors()[0]['msg']}") from None


def _models_of(run: Run, trust_remote_code: bool) -> list[EvalModel]:
    """Return the trained models of a run, by policy. Raises UsageError when one is missing, FileDamagedError when one
    belongs to another policy or run."""
    results = []
    for policy in policies_in(run.recipe):
        path = trained_model(RunDirectory(run.root), policy["name"], verify=True)
        results.append(EvalModel(policy["name"], str(path), None, trust_remote_code, _template(run, policy)))
    return results


def _initial_models(run: Run, trust_remote_code: bool) -> list[EvalModel]:
    """Return the models with which a run's policies began, by policy."""
    results = []
    for policy in policies_in(run.recipe):
        name, model, revision = policy["name"], policy.get("model"), policy.get("revision")
        try:
            path = known_model(str(model))
        except ValueError as error:
            raise UsageError(f"--initial: the model of policy {name!r} before training, {model!r}: {error}") from None
        trust = bool(policy.get("trust_remote_code")) or trust_remote_code
        results.append(EvalModel(name, path, revision, trust, _template(run, policy)))
    return results


def _template(run: Run, policy: JsonObject) -> JsonObject:
    template = part(policy, "trainer").get("chat_template_kwargs") or run.setting("trainer.chat_template_kwargs")
    return template if isinstance(template, dict) else {}


def _of_policy(pool: Recipe, policy: Policy, trust_remote_code: bool) -> EvalModel:
    trust = policy.trust_remote_code or trust_remote_code
    template = pool.trainer_settings(policy.name).get("chat_template_kwargs") or {}
    return EvalModel(policy.name, policy.model, policy.revision, trust, dict(template))


def _named(models: tuple[str, ...], trust_remote_code: bool) -> list[EvalModel]:
    named = {}
    for model in models:
        try:
            named[model] = EvalModel(model, known_model(model), None, trust_remote_code)
        except ValueError as error:
            raise UsageError(f"--model {model}: {error}") from None
    return list(named.values())
