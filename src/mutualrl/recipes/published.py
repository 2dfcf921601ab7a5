"""Rounds that the policies of a run have published, according to their checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mutualrl.recipes.stored import load_run
from mutualrl.regimes.info import RegimeInfo
from mutualrl.storage.checkpoints import Checkpoints, oldest_needed
from mutualrl.storage.rundir import RunDirectory


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
    for name, root in stores.items():
        present = set(rounds.get(name, ()))
        published = Checkpoints(root).newest_cursor()
        last = max(present, default=min(needed, published - 1) - 1)  # the newest round is never pruned
        expected = {*range(needed, published), *range(min(present, default=0), last), *range(last + 1, published)}
        missing = sorted(expected - present)
        if missing:
            span = f"{missing[0]}-{missing[-1]}" if len(missing) > 1 else str(missing[0])
            lines.append(f"policy {name}: {len(missing)} published round(s) are missing ({span})")
    return lines
