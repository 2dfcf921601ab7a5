"""The runs that a distillation reads: standalone, finished, of one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutualrl.errors import UsageError
from mutualrl.files import user_path
from mutualrl.recipes import Recipe, load
from mutualrl.regimes import get_regime
from mutualrl.rundir import RunDirectory

#: what two runs must agree on to be peers
_SAME = ("task", "data_sha256", "prompts")


@dataclass(frozen=True, slots=True)
class Source:
    """A policy of a run, with its run, recipe and the content of run.json."""

    policy: str
    run: RunDirectory
    recipe: Recipe
    info: dict[str, Any]

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of its chat template."""
        return self.recipe.trainer_settings(self.policy).get("chat_template_kwargs") or {}


def sources(runs: Sequence[Path]) -> dict[str, Source]:
    """Every policy of the runs by name. Raises UsageError for a run that shared, did not finish, or is of another task
    than the first, and for a name that two runs have."""
    found: dict[str, Source] = {}
    first: Source | None = None
    for path in runs:
        run = RunDirectory(user_path(path))
        info = run.info()
        recipe = load(run.recipe)
        if get_regime(recipe.regime_name).reads_peers:
            raise UsageError(
                f"{path}: its policies shared what they found (regime {recipe.regime_name!r}); sequential distillation "
                "starts from standalone runs: mutualrl train --regime grpo --exchange full"
            )
        for policy in recipe.policies:
            if policy.name in found:
                raise UsageError(
                    f"policy {policy.name!r} is in {found[policy.name].run.root} and in {path}; give each policy once"
                )
            if not (run.policy(policy.name).model / "config.json").is_file():
                raise UsageError(f"{path}: the run has no trained model of {policy.name!r} (did it finish?)")
            found[policy.name] = Source(policy.name, run, recipe, info)
            first = first or found[policy.name]
            _same_task(first, found[policy.name])
    if len(found) < 2:
        raise UsageError(f"a learner needs a peer; found {', '.join(found) or 'no policy'}: name a further run")
    return found


def _same_task(first: Source, other: Source) -> None:
    mine, theirs = first.info.get("fingerprint", {}), other.info.get("fingerprint", {})
    different = [key for key in _SAME if mine.get(key) != theirs.get(key)]
    if different:
        raise UsageError(
            f"{other.run.root} was trained on other prompts than {first.run.root} ({', '.join(different)} differ); "
            "peers must have seen the same"
        )
