"""Source runs of a distillation: standalone, finished, of one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.recipes import Recipe, load_run
from mutualrl.recipes.agreement import load_recipe_prompts
from mutualrl.records import Prompt
from mutualrl.regimes import baseline
from mutualrl.storage.run_info import RunInfo
from mutualrl.storage.rundir import RunDirectory
from mutualrl.storage.trained_model import trained_model


@dataclass(frozen=True, slots=True)
class SourceRun:
    """Policy of a run, with its run, recipe and the content of run.json."""

    policy: str
    run: RunDirectory
    recipe: Recipe
    info: RunInfo

    @property
    def prompts(self) -> dict[str, Prompt]:
        """Return its run's training prompts by id."""
        return {prompt.id: prompt for prompt in load_recipe_prompts(self.recipe, "train")}

    @property
    def rounds(self) -> int:
        """Return the number of rounds of its run."""
        return self.recipe.rounds(int(self.info.fingerprint["optimizer_steps_per_round"]))

    @property
    def template(self) -> dict[str, Any]:
        """Return the arguments of its chat template."""
        return self.recipe.trainer_settings(self.policy).get("chat_template_kwargs") or {}


def sources(runs: Sequence[Path], *, alone: bool = False) -> dict[str, SourceRun]:
    """Return every policy of the runs by name. Raises UsageError for a run that is not plain GRPO or did not finish,
    for a name in two runs, and for a learner without a peer, unless `alone`."""
    source_runs: dict[str, SourceRun] = {}
    for path in runs:
        run = RunDirectory(user_path(path))
        info = run.info()
        recipe = load_run(run)
        if recipe.regime_name != baseline().name:
            raise UsageError(
                f"{path}: a run of regime {recipe.regime_name!r}; sequential distillation starts from standalone GRPO: "
                "mutualrl train --regime grpo --exchange full"
            )
        for policy in recipe.policies:
            if policy.name in source_runs:
                raise UsageError(
                    f"policy {policy.name!r} is in {source_runs[policy.name].run.root} and in {path}; "
                    "name each policy once"
                )
            trained_model(run, policy.name, verify=True)
            source_runs[policy.name] = SourceRun(policy.name, run, recipe, info)
    if len(source_runs) < 2 and not alone:
        raise UsageError(f"a learner needs a peer; found {', '.join(source_runs) or 'no policy'}: name another run")
    return source_runs


def require_same_prompts(prompts: Mapping[str, Mapping[str, Prompt]]) -> None:
    """Raise UsageError if a policy was trained on other prompts than the first, by their texts."""
    texts = {name: {prompt.text for prompt in policy_prompts.values()} for name, policy_prompts in prompts.items()}
    first = next(iter(texts))
    for name, policy_prompts in texts.items():
        if policy_prompts != texts[first]:
            example = min(policy_prompts ^ texts[first])
            raise UsageError(
                f"{name!r} was trained on other prompts than {first!r} ({len(policy_prompts ^ texts[first])} are not "
                f"in both, e.g. {example[:60]!r}); peers must have seen the same prompts"
            )
