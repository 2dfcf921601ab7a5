"""An exchange of recorded texts: one member, one round, as `mutualrl exchange import` writes it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from mutualrl.console.user_path import user_path
from mutualrl.errors import DataError, UsageError
from mutualrl.launch.import_request import ImportRequest
from mutualrl.recipes import Recipe, resolve, yaml_file
from mutualrl.recipes.agreement import all_prompts
from mutualrl.recipes.pool_tokenizers import load_tokenizers
from mutualrl.recipes.run_sources import criterion_of, described, require_recorded
from mutualrl.regimes import baseline
from mutualrl.regimes.info import RegimeInfo
from mutualrl.rollouts import Rollouts
from mutualrl.see import Exchange
from mutualrl.sources.prepare import Prepared, prepare_sources
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import RunDirectory, command_line, create, require_creatable, versions


def import_texts(request: ImportRequest) -> tuple[RunDirectory, Prepared]:
    """Write a directory with an exchange of the texts that a file has for a task's prompts, verified. Raises
    DataError, RecipeError, RunDirectoryError."""
    path = user_path(request.out)
    require_creatable(path)
    models = (request.model,) if request.model is not None else ()
    sources = (f"{request.name}=recorded:{request.file}",)
    recipe = resolve(replace(request.asked, models=models, sources=sources))
    if request.model is None and recipe.task.reward != ("boxed",):
        raise UsageError("--model: reward functions of your own are given a tokenizer's ids; name the model to train")
    prompts = all_prompts(recipe, "train")
    (section,) = [each for each in recipe.sources if each.name == request.name]
    spec = require_recorded(section).model_copy(update={"allow_validation": True})
    tokenizers = {} if request.model is None else load_tokenizers(recipe)
    prepared = prepare_sources([spec], criterion_of(recipe, tokenizers, prompts))[section.name]
    if not prepared.source.verified:
        raise DataError(f"source {section.name!r}: {prepared.note}; an exchange has rewards: train with --source")
    texts = {prompt.id: prompt.text for prompt in prompts}
    rollouts = [replace(rollout, prompt=texts[rollout.prompt_id]) for rollout in Rollouts(prepared.source.table)]
    with ExitStack() as held:
        run = create(path, _info(recipe, {section.name: prepared}), held)
        Exchange(run.exchange, section.name, run.info().run_id).publish(0, rollouts, 0)
    return run, prepared


def _info(recipe: Recipe, sources: Mapping[str, Prepared]) -> RunInfo:
    """Return the content of run.json: of a run without a recipe, as users' own scripts write it."""
    text = yaml_file.dump({"policies": [], "task": recipe.task.model_dump(mode="json", exclude_none=True)})
    return RunInfo(
        run_id=uuid.uuid4().hex,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command_line(),
        versions=versions(),
        regime=baseline().name,
        regime_info=RegimeInfo.of(baseline()).model_dump(mode="json"),
        recipe=text,
        scripts=True,
        data={"imported": described(sources)},
    )
