"""Checks of a start, before any process is started: shared by `train`, `join`, `--dry-run` and `init`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from mutualrl.console.display import clean
from mutualrl.engines.model_files import check_model
from mutualrl.errors import DataError, MachineError, ModelError, RecipeError, UsageError
from mutualrl.launch.session import counted
from mutualrl.mwra.model_shape import adapter_problem
from mutualrl.process.loading import fast_imports
from mutualrl.recipes import Recipe
from mutualrl.recipes.agreement import (
    data_note,
    few_held_out,
    fingerprint,
    read_splits,
    require_enough,
    shared_prompts,
    validation_sample,
)
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.run_sources import Prediction, learners_of, prediction_of, prepared, served_source
from mutualrl.records import Prompt
from mutualrl.seeds import seed_of
from mutualrl.sources.answers import first_account
from mutualrl.sources.prepare import has_one_verdict
from mutualrl.sources.section import AskedSource, FrozenSource
from mutualrl.sources.served import key_of, preflight
from mutualrl.storage.accounts import Account
from mutualrl.storage.allocation import BatchPlan
from mutualrl.storage.run_info import Fingerprint, RunInfo
from mutualrl.tasks.dataset import boxed_notes, column_notes
from mutualrl.tasks.rewarding import BOXED
from mutualrl.tasks.rewards import require_rewards
from mutualrl.tasks.turns import require_turns, try_turns
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from mutualrl.sources.prepare import Prepared


@dataclass(frozen=True, slots=True)
class CheckedData:
    """Checked inputs of a run: its prompts, the validation prompts that are used and all of them, notes for the user,
    and what run.json says of the data."""

    prompts: list[Prompt]
    validation: list[Prompt]
    all_validation: list[Prompt]
    notes: tuple[str, ...]
    data: dict[str, object]


def check_inputs(recipe: Recipe) -> CheckedData:
    """Check the user's code (without running it) and the data. Raises UsageError, DataError."""
    require_rewards(recipe.task.reward)
    require_turns(recipe.task.environment, recipe.task.tools)
    splits = read_splits(recipe)
    prompts, validation = splits.train.prompts, validation_sample(recipe, splits.validation.prompts)
    data = splits.to_json(len(validation))
    unread = [] if recipe.active_sources else [source.name for source in recipe.sources]
    notes = [f"source {name} is not read: regime {recipe.regime_class.name!r} learns no texts" for name in unread]
    few = few_held_out(data)
    notes += [data_note(data), *([] if few is None else [few])]
    notes += shared_prompts(prompts, splits.validation.prompts)
    notes += column_notes(prompts) + (boxed_notes(prompts) if recipe.task.reward == BOXED else [])
    return CheckedData(prompts, validation, splits.validation.prompts, tuple(notes), data)


def check_turns(recipe: Recipe, inputs: CheckedData) -> None:
    """Try the user's tools and environment in a process of its own, which may do as it likes: import a library that
    takes a GPU, change a random state, end. Raises UsageError."""
    turns = recipe.task.turns
    if turns is None or all(path.startswith("mutualrl.") for path in (turns.environment, *turns.tools) if path):
        return
    arguments = (turns, recipe.task.reward, inputs.prompts[0], recipe.run.step_timeout)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(try_turns, *arguments).result()
    except BrokenProcessPool:
        paths = ", ".join(path for path in (turns.environment, *turns.tools) if path)
        raise UsageError(f"task.tools, task.environment: {paths} ended the process that imported them") from None


def check_models(recipe: Recipe, names: Sequence[str]) -> None:
    """Check the base models of these policies. Raises ModelError, FileDamagedError."""
    checked = set()
    for policy in recipe.policies:
        key = (resolve_path(policy.model), policy.revision)
        if policy.name in names and key not in checked:
            _check_model(f"policy {policy.name!r}", *key, trust_remote_code=policy.trust_remote_code)
            checked.add(key)


def _check_model(member: str, path: str, revision: str | None, *, trust_remote_code: bool) -> None:
    """Check a member's model. Raises ModelError with the member's name."""
    try:
        check_model(path, revision, trust_remote_code=trust_remote_code)
    except ModelError as error:
        raise type(error)(f"{member}: {error}") from error


#: schedules that take no arguments of their own
PLAIN_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


def check_training(recipe: Recipe, names: Collection[str]) -> None:
    """Check what libraries would refuse in the policies' processes: arguments of the schedule, layers of adapters.
    Raises RecipeError with the keys."""
    problems = []
    for policy in recipe.policies:
        if policy.name in names:
            problems += _schedule_problems(recipe, policy.name)
            lora = recipe.lora_settings(policy.name)
            if lora is not None and (problem := adapter_problem(policy, lora)) is not None:
                problems.append(f"lora.target_modules of {policy.name!r}: {problem}")
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))


def _schedule_problems(recipe: Recipe, policy: str) -> list[str]:
    """Return what is wrong with the arguments of a policy's schedule of learning rates, as transformers finds it."""
    settings = recipe.trainer_settings(policy)
    kind, arguments = settings.get("lr_scheduler_type", "linear"), settings.get("lr_scheduler_kwargs")
    if not arguments and kind in PLAIN_SCHEDULES:
        return []
    with fast_imports():
        import torch
        from transformers import get_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        get_scheduler(kind, optimizer, 0, 10, scheduler_specific_kwargs=arguments or {})
    except (TypeError, ValueError, KeyError) as error:
        return [f"trainer.lr_scheduler_kwargs of {policy!r}: {kind} does not take {arguments or {}}: {error}"]
    return []


def check_sources(recipe: Recipe, inputs: CheckedData, names: Collection[str] | None = None) -> dict[str, Prepared]:
    """Return the recipe's sources, or those of some `names`, read and verified; loads the policies' tokenizers if there
    are any. Raises DataError, RewardError, ModelError."""
    if not recipe.recorded_sources:
        return {}
    return prepared(recipe, load_tokenizers(recipe), inputs.prompts, inputs.all_validation, names)


class AskedSources(NamedTuple):
    """Checked sources that answer during training: the models of served ones by name, notes, and what their first
    questions cost."""

    models: dict[str, str]
    notes: list[str]
    first: dict[str, Account]


def check_asked_sources(
    recipe: Recipe,
    inputs: CheckedData,
    here: Collection[str],
    *,
    contact: bool = True,
    resumed: RunInfo | None = None,
) -> AskedSources:
    """Check the sources that answer during training and what the data say of them; of those that run `here` the models
    of frozen ones, the keys and, if `contact`, the endpoints of served ones. A resumed run goes on with the model that
    it began with, and without an endpoint that is gone, as `on_source_loss` says. Raises UsageError, DataError,
    ModelError, MachineError."""
    models, notes, accounts = {}, [], {}
    for section in recipe.asked_sources:
        if section.column is not None:
            _require_named_sources(recipe, section.column, inputs.prompts)
        if section.name not in here:
            continue
        if isinstance(section, FrozenSource):
            path, trusted = resolve_path(section.frozen), section.trust_remote_code
            _check_model(f"source {section.name!r}", path, section.revision, trust_remote_code=trusted)
            continue
        known = {} if resumed is None else resumed.asked_sources.get(section.name, {})
        source, key = served_source(recipe, section, known.get("model")), key_of(section.api_key_env, section.name)
        if section.api == "completions" and any(prompt.messages for prompt in inputs.prompts):
            raise UsageError(
                f"sources.{section.name}.api: found completions, but the prompts are conversations; expected chat"
            )
        if contact:
            try:
                first = next((each for each in inputs.prompts if _may_be_asked(section, each)), None)
                seed = seed_of(recipe.run.seed, section.name, "first question")
                model, answer = asyncio.run(preflight(source, key, None if resumed else first, seed))
                models[section.name] = model
                notes.append(f"source {section.name}: {clean(model, 100)} at {section.served}")
                if first is not None and answer.outcome != "left_out":
                    accounts[section.name] = first_account(answer, (section.system or "") + first.text)
                if answer.outcome == "failed":
                    problem = f"source {section.name!r}: no answer to a first question: {answer.failure}"
                    if section.on_source_loss == "fail":
                        raise MachineError(problem)
                    notes.append(problem)
            except MachineError as error:
                if resumed is None or section.on_source_loss == "fail":
                    raise
                notes.append(f"{error}; the run continues, without its answers while that is so")
    ordered = [section for section in recipe.asked_sources if section.after is not None]
    if ordered and not has_one_verdict(recipe.task.reward, learners_of(recipe, load_tokenizers(recipe))):
        raise UsageError(
            f"sources.{ordered[0].name}.after: needs one verdict on a text for all learners, and the reward functions "
            "depend on the learner or on training; leave it out"
        )
    return AskedSources(models, notes, accounts)


def _may_be_asked(section: AskedSource, prompt: Prompt) -> bool:
    return section.column is None or prompt.columns.get(section.column) == section.name


def predictions(recipe: Recipe, batch: BatchPlan, asked: AskedSources | None = None) -> dict[str, Prediction]:
    """Return what each source that is asked will do, by name. `recipe`: with its epochs converted to steps; `asked`:
    what was found of them."""
    predicted = {each.name: prediction_of(recipe, each, batch) for each in recipe.asked_sources}
    if asked is None:
        return predicted
    return {
        name: replace(each, model=asked.models.get(name), first=asked.first.get(name))
        for name, each in predicted.items()
    }


def _require_named_sources(recipe: Recipe, column: str, prompts: Sequence[Prompt]) -> None:
    """Raise DataError unless each row names a source, or none, in a column."""
    known = {section.name for section in recipe.asked_sources}
    for prompt in prompts:
        found = prompt.columns.get(column)
        if found is not None and found != "" and found not in known:
            raise DataError(
                f"the row of prompt {prompt.id!r} has {found!r:.60} in its column {column!r}, expected a source: "
                f"{', '.join(sorted(known))}; or nothing"
            )
    if not any(prompt.columns.get(column) in known for prompt in prompts):
        raise DataError(f"no row of the data names a source ({', '.join(sorted(known))}) in its column {column!r}")


def check_batch(recipe: Recipe, batch: BatchPlan, inputs: CheckedData) -> tuple[Recipe, Fingerprint]:
    """Return the recipe with its epochs converted to steps, and the fingerprint that all policies must share, without
    sources. Raises DataError for too few prompts, UsageError for a column that cannot be hashed."""
    require_enough(inputs.prompts, batch.prompts)
    recipe = counted(recipe, batch, len(inputs.prompts))
    return recipe, fingerprint(recipe, batch, inputs.prompts, inputs.validation)
