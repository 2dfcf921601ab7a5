"""Comparison of runs without a sweep: one run per arm and seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_runs import edit_recipe, made_run
from mutualrl.errors import UsageError
from mutualrl.study.compare_runs import compare_paths


def test_two_runs_of_one_regime_and_seed_are_rejected_suggesting_a_sweep(tmp_path: Path) -> None:
    """Runs of one regime and seed with two learning rates are one arm here; which of them to pair is ambiguous."""
    paths = [made_run(tmp_path / name, "grpo") for name in ("slow", "fast")]
    for path, rate in zip(paths, (1e-6, 1e-5), strict=True):
        edit_recipe(path, lambda recipe, rate=rate: recipe.update(trainer={"learning_rate": rate}))
    with pytest.raises(UsageError, match=r"grpo: found two runs of seed 0, expected one run per seed; .*sweep FILE"):
        compare_paths(paths)


def test_runs_of_two_arms_are_paired_by_seed(tmp_path: Path) -> None:
    paths = [
        made_run(tmp_path / f"{regime}-{seed}", regime, seed=seed, gain=gain)
        for regime, gain in (("grpo", 0.2), ("sgt", 0.3))
        for seed in (0, 1)
    ]
    comparison = compare_paths(paths)
    (pool,) = comparison.differences
    difference = comparison.differences[pool]["sgt"]["accuracy"]
    assert (difference.n, round(difference.mean, 6)) == (2, 0.1)
