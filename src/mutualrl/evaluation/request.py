"""What an evaluation is asked to do, checked before any model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mutualrl.errors import UsageError
from mutualrl.recipes import load
from mutualrl.records import Prompt
from mutualrl.rundir import RunDirectory
from mutualrl.tasks import TaskSource, get_task

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
        cls, *, run: Path | None, models: tuple[str, ...], suite: str, data: Path | None, limit: int | None,
        max_new_tokens: int | None, seed: int, trust_remote_code: bool,
    ) -> EvalRequest:  # fmt: skip
        """Check the flags. Raises UsageError or DataError with what was expected."""
        if (run is None) == (not models):
            raise UsageError("name what to evaluate: either --run DIR, or --model PATH (once or more)")
        task = get_task(suite)
        prompts = task.load("validation", TaskSource(validation_data=data, seed=seed))
        if limit is not None and limit < len(prompts):
            prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
        named = _models_of(run) if run is not None else _named(models)
        return cls(suite, named, prompts, max_new_tokens or MAX_NEW_TOKENS[suite], trust_remote_code)


def _models_of(root: Path) -> dict[str, str]:
    """The trained models of a run, by policy. Raises UsageError when one is missing."""
    run = RunDirectory(root)
    run.info()
    found = {}
    for policy in load(run.recipe).policies:
        path = run.policy(policy.name).model
        if not (path / "config.json").is_file():
            raise UsageError(f"{path}: the run has no trained model of {policy.name!r} (did it finish?)")
        found[policy.name] = str(path)
    return found


def _named(models: tuple[str, ...]) -> dict[str, str]:
    from mutualrl.recipes.schema import known_model

    named = {}
    for model in models:
        try:
            named[model] = known_model(model)
        except ValueError as error:
            raise UsageError(f"--model {model}: {error}") from None
    return named
