"""What an evaluation is asked to do, checked before any model is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutualrl.errors import UsageError
from mutualrl.files import user_path
from mutualrl.recipes.schema import POLICY_NAME, known_model
from mutualrl.recipes.yaml_file import read
from mutualrl.records import Prompt
from mutualrl.rundir import RunDirectory
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.base import spread

MAX_NEW_TOKENS = {"arithmetic": 64, "math": 1024}


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Models by name, prompts, and the decoding limit."""

    suite: str
    models: dict[str, str]
    prompts: list[Prompt]
    max_new_tokens: int
    trust_remote_code: bool

    @classmethod
    def of(
        cls, *, run: Path | None, models: tuple[str, ...], suite: str | None, data: Path | None, limit: int | None,
        max_new_tokens: int | None, seed: int, trust_remote_code: bool,
    ) -> EvalRequest:  # fmt: skip
        """Check the flags; a run's own task and completion limit are the defaults for its models.

        Raises UsageError or DataError with what was expected.
        """
        if (run is None) == (not models):
            raise UsageError("name what to evaluate: either --run DIR, or --model PATH (once or more)")
        recipe = {} if run is None else _recipe_of(RunDirectory(user_path(run)))
        chosen = suite or _get(recipe, "task", "name") or "arithmetic"
        prompts = get_task(chosen).load("validation", TaskSource(validation_data=data, seed=seed))
        if limit is not None:
            prompts = spread(prompts, limit)
        tokens = max_new_tokens or _get(recipe, "trainer", "max_completion_length") or MAX_NEW_TOKENS[chosen]
        named = _named(models) if run is None else _models_of(RunDirectory(user_path(run)), recipe)
        return cls(chosen, named, prompts, tokens, trust_remote_code)


def _recipe_of(run: RunDirectory) -> dict[str, Any]:
    """The recipe of a run as it was written. Its models need not be there any more, only the trained ones."""
    run.info()
    recipe = read(run.recipe)
    policies = recipe.get("policies")
    names = [p.get("name") if isinstance(p, dict) else None for p in policies] if isinstance(policies, list) else []
    if not names or not all(isinstance(name, str) and re.match(POLICY_NAME, name) for name in names):
        raise UsageError(f"{run.recipe} is damaged: expected `policies:` with a name each, found {repr(policies)[:80]}")
    tokens = _get(recipe, "trainer", "max_completion_length")
    if not isinstance(_get(recipe, "task", "name"), str) or not isinstance(tokens, int):
        raise UsageError(f"{run.recipe} is damaged: expected task.name and trainer.max_completion_length")
    return recipe


def _get(recipe: dict[str, Any], section: str, key: str) -> Any:
    value = recipe.get(section)
    return value.get(key) if isinstance(value, dict) else None


def _models_of(run: RunDirectory, recipe: dict[str, Any]) -> dict[str, str]:
    """The trained models of a run, by policy. Raises UsageError when one is missing."""
    found = {}
    for policy in recipe["policies"]:
        path = run.policy(policy["name"]).model
        if not (path / "config.json").is_file():
            raise UsageError(f"{path}: the run has no trained model of {policy['name']!r} (did it finish?)")
        found[policy["name"]] = str(path)
    return found


def _named(models: tuple[str, ...]) -> dict[str, str]:
    named = {}
    for model in models:
        try:
            named[model] = known_model(model)
        except ValueError as error:
            raise UsageError(f"--model {model}: {error}") from None
    return named
