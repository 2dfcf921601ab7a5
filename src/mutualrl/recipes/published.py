"""Rounds that the policies of a run have published, according to their checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from mutualrl.errors import FileDamagedError
from mutualrl.recipes.schema import Recipe
from mutualrl.recipes.stored import load_run
from mutualrl.regimes.info import RegimeInfo
from mutualrl.storage.checkpoints import Checkpoints, oldest_needed
from mutualrl.storage.run_info import RunInfo, policy_result
from mutualrl.storage.rundir import RunDirectory


def _published(run: RunDirectory, recipe: Recipe, name: str, info: RunInfo) -> int:
    """Return how many rounds a policy has published, as far as that is known: all of a finished one, else up to its
    newest checkpoint."""
    files = run.policy(name)
    steps = 0
    with suppress(FileDamagedError):  # `runs verify` names it
        result = policy_result(files.result, run.root)
        steps = 0 if result is None else result.steps
    per_round = recipe.steps_per_round(int(info.fingerprint.get("optimizer_steps_per_round", 1)))
    return max(Checkpoints(files.root).newest_cursor(), -(-steps // per_round))


def missing_rounds(run: RunDirectory, rounds: Mapping[str, Collection[int]]) -> list[str]:
    """Return messages about missing rounds, given the existing `rounds` by policy: gaps, and rounds that were published
    according to the policy's checkpoints and that some policy may still read."""
    info = run.info()
    if info.scripts:  # their checkpoints are transformers', without a cursor
        return []
    recipe = load_run(run, without_models=True)
    if not RegimeInfo.from_run(info.regime, info.regime_info).reads_peers and recipe.run.publish != "full":
        return []  # nothing is published
    stores = {p.name: run.policy(p.name).root for p in recipe.policies}
    needed, lines = oldest_needed(list(stores.values()), recipe.exchange.staleness), []
    for name in stores:
        present = set(rounds.get(name, ()))
        published = _published(run, recipe, name, info)
        last = max(present, default=min(needed, published - 1) - 1)  # the newest round is never pruned
        expected = {*range(needed, published), *range(min(present, default=0), last), *range(last + 1, published)}
        missing = sorted(number for number in expected - present if number >= 0)
        if missing:
            span = f"{missing[0]}-{missing[-1]}" if len(missing) > 1 else str(missing[0])
            lines.append(f"policy {name}: {len(missing)} published round(s) are missing ({span})")
    return lines
