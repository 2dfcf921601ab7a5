"""Comparability of runs: which may be compared, and which settings are not matched.

A comparison has runs of one task and one pool; an arm is a regime with its settings, whose runs differ in seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mutualrl.process.status import RunState
from mutualrl.recipes.differences import by_dotted_key
from mutualrl.recipes.free import may_differ
from mutualrl.recipes.schema import Recipe
from mutualrl.runs.curves import by_arm
from mutualrl.runs.logs import LoggedRun
from mutualrl.runs.record import Run
from mutualrl.storage.files import JsonObject


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs that may be compared, and notes on unmatched settings."""

    name: str
    runs: tuple[LoggedRun, ...]
    notes: tuple[str, ...]

    @property
    def arms(self) -> dict[str, list[LoggedRun]]:
        """Return the runs by regime and settings."""
        return by_arm(self.runs)


def comparisons(runs: Sequence[LoggedRun]) -> list[Comparison]:
    """Return the runs grouped by task and pool; runs of different groups are never compared."""
    groups: dict[tuple[str, ...], list[LoggedRun]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    results: list[Comparison] = []
    for group in groups.values():
        name = f"{group[0].task}, pool {group[0].pool}"
        same_name = [other for other in results if other.name == name]
        results.append(
            Comparison(f"{name} ({len(same_name) + 1})" if same_name else name, tuple(group), tuple(_unmatched(group)))
        )
    return results


def _identity(run: Run) -> tuple[str, ...]:
    task = sorted(f"{key}={value!r}" for key, value in run.section("task").items() if key != "max_prompt_tokens")
    models = [f"{name}={policy.model}" for name, policy in run.policies.items()]
    return (run.task, *task, *models)


def _unmatched(runs: Sequence[Run]) -> list[str]:
    """Return notes on settings, other than regime and seed, in which the runs differ, on unfinished runs and on
    duplicate seeds."""
    flat = {run.name: _flat(run.recipe) for run in runs}
    keys = sorted(set().union(*flat.values()))
    notes = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for name, settings in flat.items():
            by_value.setdefault(json.dumps(settings.get(key), default=str), []).append(name)
        if len(by_value) > 1:
            notes.append(f"not matched: {key} is {_by_value(by_value)}")
    notes += _other_data(runs)
    seeds_of: dict[str, list[str]] = {}
    for arm, members in by_arm(runs).items():
        seeds_of[arm] = sorted({str(run.seed) for run in members})
    if len({tuple(seeds) for seeds in seeds_of.values()}) > 1:
        seeds_text = "; ".join(f"{arm} {', '.join(seeds)}" for arm, seeds in seeds_of.items())
        notes.append(f"not matched: the arms have different seeds: {seeds_text}")
    for arm, members in by_arm(runs).items():
        seeds = [run.seed for run in members]
        if len(set(map(str, seeds))) < len(seeds):
            notes.append(f"{arm}: duplicate seeds ({', '.join(map(str, seeds))}); the spread is underestimated")
        if unfinished := [run.name for run in members if run.state != RunState.FINISHED]:
            notes.append(f"{arm}: not finished: {', '.join(unfinished)}; curves end with the shortest run")
    return notes


def _by_value(names: Mapping[str, Sequence[str]]) -> str:
    parts = []
    for value, runs in names.items():
        ellipsis = ", ..." if len(runs) > 3 else ""
        parts.append(f"{value} ({', '.join(runs[:3])}{ellipsis})")
    return "; ".join(parts)


def _other_data(runs: Sequence[Run]) -> list[str]:
    """Return notes on runs of one seed with different training data, and on runs of different versions."""
    notes = []
    by_seed: dict[str, dict[str, list[str]]] = {}
    by_version: dict[str, list[str]] = {}
    for run in runs:
        data_digest = str(run.info.fingerprint.get("data_sha256", "?"))[:12]
        by_seed.setdefault(str(run.seed), {}).setdefault(data_digest, []).append(run.name)
        versions_text = ", ".join(f"{name} {run.info.versions.get(name, '?')}" for name in ("mutualrl", "trl", "torch"))
        by_version.setdefault(versions_text, []).append(run.name)
    for seed, fingerprints in by_seed.items():
        if len(fingerprints) > 1:
            notes.append(f"not matched: the training data of seed {seed} are {_by_value(fingerprints)}")
    if len(by_version) > 1:
        notes.append(f"not matched: made by {_by_value(by_version)}")
    return notes


def _flat(recipe: JsonObject) -> JsonObject:
    """Return the settings of a recipe by dotted key, without those in which compared runs may differ."""
    return {key: value for key, value in by_dotted_key(recipe).items() if not may_differ(Recipe, key, "comparison")}
