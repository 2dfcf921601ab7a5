"""Agreement of all policies of a run before the first step: prompts, order, seed, batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mutualrl.errors import DataError, PlanMismatchError
from mutualrl.plugins import entry_points, is_import_path, source_digest, without_directory
from mutualrl.recipes.batch_plan import BatchPlan
from mutualrl.recipes.schema import Recipe
from mutualrl.records import Prompt, content_digest
from mutualrl.regimes import parts_of
from mutualrl.storage.run_info import Fingerprint
from mutualrl.tasks import Split, get_task, load_prompts
from mutualrl.tasks.base import sample_evenly
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tasks.mixture import sample_evenly_by_task

logger = logging.getLogger(__name__)
MOST_WITHOUT = 0.1  # share of the prompts that may be without a solution under `teacher: gold`


def load_recipe_prompts(recipe: Recipe, split: Split) -> list[Prompt]:
    """Return prompts of a split, as the recipe's task gives them; validation is cut at `run.validation_limit` (of a
    mixture: for each member).

    Raises DataError for rows that do not fit, or when there are fewer prompts than a round needs.
    """
    section = recipe.task
    prompts = load_prompts(get_task(section.name), split, section.source(recipe.run.seed))
    if not prompts:
        raise DataError(f"task {section.name!r} has no {split} prompts; give more data, or name task.validation_data")
    if split == "validation":
        cut = sample_evenly_by_task if section.name == "mixture" else sample_evenly
        return cut(prompts, recipe.run.validation_limit)
    return prompts


def solutions(recipe: Recipe, policy: str, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return the texts that a policy's regime learns from the data, by prompt id (SGT's `teacher: gold`); none where it
    learns none. One that does not earn the reward itself is left out, with a warning.

    Raises DataError where no prompt has one; of the column `solution`, where more than one prompt in ten has none,
    since the arm would not be matched with the one that it controls.
    """
    column = recipe.spec.solution_column(recipe.regime_settings(policy))
    if column is None:
        return {}
    given = {}
    for prompt in prompts:
        text = prompt.solution if column == "solution" else prompt.columns.get(column)
        if isinstance(text, str) and text.strip():
            given[prompt.id] = text
    if recipe.task.reward == ("boxed",):
        correct = {p.id: given[p.id] for p in prompts if p.id in given and boxed_score(given[p.id], p.answer)}
    else:
        logger.warning("regime.teacher=gold: the solutions are not checked against %s", ", ".join(recipe.task.reward))
        correct = given
    lacking = [prompt.id for prompt in prompts if prompt.id not in correct]
    if not lacking:
        return correct
    problems = (
        f"regime.teacher=gold learns the solutions in the data, and of {len(prompts)} training prompts of task "
        f"{recipe.task.name!r} {len(prompts) - len(given)} have none and {len(given) - len(correct)} one that does not "
        f"earn the reward, such as {lacking[0]!r}"
    )
    if not correct or (column == "solution" and len(lacking) > MOST_WITHOUT * len(prompts)):
        raise DataError(f"{problems}; expected a field {column!r} that ends in \\boxed{{answer}} (tasks math, dataset)")
    logger.warning("%s; these give no pair", problems)
    return correct


def require_enough(prompts: Sequence[Prompt], needed: int) -> None:
    """Raise DataError when the prompts do not fill one round."""
    if len(prompts) < needed:
        raise DataError(
            f"{len(prompts)} training prompts are left, a round needs {needed}; give more data, or set "
            "round.prompts lower"
        )


def fingerprint(
    recipe: Recipe, batch: BatchPlan, prompts: Sequence[Prompt], validation: Sequence[Prompt]
) -> Fingerprint:
    """Return the batch plan in comparable form: all that the data hold and their order, the source files of the user's
    code, seed, prompts per round, rollouts per prompt. What a source file imports in turn is not in it."""
    code = {}
    parts = parts_of(recipe.regime_name)
    named = [("regime" if len(parts) == 1 else f"regime {number}", name) for number, name in enumerate(parts)]
    for key, name in (*named, ("task", recipe.task.name)):
        group = entry_points(f"mutualrl.{key.partition(' ')[0]}s")
        if is_import_path(name) or name in group:  # a run whose code has changed is another run
            code[f"{key}_sha256"] = source_digest(group[name].value if name in group else name)
    turns = [] if recipe.task.environment is None else [("environment", recipe.task.environment)]
    for key, path in (*turns, *(("tool", path) for path in recipe.task.tools)):
        code[f"{key} {without_directory(path)}"] = source_digest(path)
    for number, path in enumerate(recipe.task.reward):
        if is_import_path(path):
            several = f" {number}" if len(recipe.task.reward) > 1 else ""
            code[f"reward{several} {without_directory(path)}"] = source_digest(path)
    return {
        **code,
        "task": without_directory(recipe.task.name),
        "data_sha256": content_digest(prompts),
        "validation_sha256": content_digest(validation),
        "prompts": len(prompts),
        "seed": recipe.run.seed,
        "max_prompt_tokens": recipe.task.max_prompt_tokens,
        "prompts_per_round": batch.prompts,
        "rollouts_per_prompt": batch.rollouts,
        "optimizer_steps_per_round": batch.optimizer_steps,
        "steps": recipe.run.steps,
    }


def compare(policy: str, own: Fingerprint, runs: Fingerprint) -> None:
    """Raise PlanMismatchError naming every key in which a policy's plan differs from the run's."""
    different = [
        f"{key}: {own.get(key)!r}, the run has {runs.get(key)!r}"
        for key in sorted({*own, *runs} - {"rollouts_per_prompt"})
        if own.get(key) != runs.get(key)
    ]
    if different:
        raise PlanMismatchError(
            f"policy {policy!r} would train on another batch plan than the run: " + "; ".join(different)
        )


def compare_models(digests: Mapping[str, str], runs: Mapping[str, str]) -> None:
    """Raise PlanMismatchError naming a policy whose base model is not the run's. What is not known of a model (it was
    not downloaded yet) is not compared."""
    for policy, digest in digests.items():
        before = runs.get(policy)
        if digest and before and digest != before:
            raise PlanMismatchError(
                f"policy {policy!r}: the files of its base model have changed: found {digest[:19]}, the run began with "
                f"{before[:19]}"
            )
