"""What every policy of a run must agree on before the first step: prompts, order, seed, batch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from mutualrl.errors import DataError, PlanMismatchError
from mutualrl.recipes.batch import BatchPlan
from mutualrl.recipes.schema import Recipe
from mutualrl.records import Prompt
from mutualrl.regimes import get_regime
from mutualrl.tasks import Split, get_task
from mutualrl.tasks import load_prompts as read_prompts
from mutualrl.tasks.base import spread
from mutualrl.tasks.boxed import boxed_score
from mutualrl.tasks.mixture import spread_by_member

logger = logging.getLogger(__name__)


def load_prompts(recipe: Recipe, split: Split) -> list[Prompt]:
    """Prompts of a split, as the recipe's task gives them; validation is cut at `run.validation_limit` (of a mixture:
    for each member).

    Raises DataError for rows that do not fit, or when there are fewer prompts than a round needs.
    """
    section = recipe.task
    prompts = read_prompts(get_task(section.name), split, section.source(recipe.run.seed))
    if not prompts:
        raise DataError(f"task {section.name!r} has no {split} prompts; give more data, or name task.validation_data")
    if split == "train":
        _require_solutions(recipe, prompts)
    if split == "validation":
        cut = spread_by_member if section.name == "mixture" else spread
        return cut(prompts, recipe.run.validation_limit)
    return prompts


def _require_solutions(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Raise DataError when some policy's regime learns the data's solutions, and a prompt has none."""
    spec = get_regime(recipe.regime_name)
    if not any(spec.needs_solutions(recipe.regime_settings(p.name)) for p in recipe.policies):
        return
    lacking = [prompt.id for prompt in prompts if not (prompt.solution or "").strip()]
    if lacking:
        raise DataError(
            f"regime.teacher=gold learns the solutions in the data, and {len(lacking)} of {len(prompts)} training "
            f"prompts of task {recipe.task.name!r} have none, such as {lacking[0]!r}; expected a field 'solution' in "
            "every row (tasks math, dataset, arithmetic)"
        )
    if recipe.task.reward != ("boxed",):
        logger.warning("regime.teacher=gold: the solutions are not checked against %s", ", ".join(recipe.task.reward))
        return
    wrong = [prompt.id for prompt in prompts if not boxed_score(prompt.solution or "", prompt.answer)]
    if wrong:
        raise DataError(
            f"regime.teacher=gold: {len(wrong)} of {len(prompts)} solutions do not earn the reward, such as that of "
            f"{wrong[0]!r}; expected each to end in \\boxed{{answer}}"
        )


def require_enough(prompts: Sequence[Prompt], batch: BatchPlan) -> None:
    """Raise DataError when the prompts do not fill one round."""
    if len(prompts) < batch.prompts:
        raise DataError(
            f"{len(prompts)} training prompts are left, a round needs {batch.prompts}; give more data, or set "
            "round.prompts lower"
        )


def fingerprint(recipe: Recipe, batch: BatchPlan, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The batch plan in comparable form: data set and order, seed, prompts a round, rollouts a prompt."""
    digest = hashlib.sha256("\n".join(p.id for p in prompts).encode()).hexdigest()
    return {
        "task": recipe.task.name,
        "data_sha256": digest,
        "prompts": len(prompts),
        "seed": recipe.run.seed,
        "max_prompt_tokens": recipe.task.max_prompt_tokens,
        "prompts_per_round": batch.prompts,
        "rollouts_per_prompt": batch.rollouts,
        "optimizer_steps_per_round": batch.optimizer_steps,
        "steps": recipe.run.steps,
    }


def compare(policy: str, mine: dict[str, Any], runs: dict[str, Any]) -> None:
    """Raise PlanMismatchError naming every key in which a policy's plan differs from the run's."""
    different = [
        f"{key}: {mine.get(key)!r}, the run has {runs.get(key)!r}"
        for key in sorted({*mine, *runs} - {"rollouts_per_prompt"})
        if mine.get(key) != runs.get(key)
    ]
    if different:
        raise PlanMismatchError(
            f"policy {policy!r} would train on another batch plan than the run: " + "; ".join(different)
        )
