"""Advantages whitened over a round (`round.whiten_advantages`): by hand, against TRL, in runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOTrainer

from conftest import Cli
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import UsageError
from mutualrl.records import Rollout
from mutualrl.regimes import ExtraRow, Plan, RoundView, RowSource, whitened_plan
from mutualrl.regimes.advantages import whiten
from mutualrl.rollouts import Rollouts
from mutualrl.training import MutualGRPOTrainer
from training_harness import publish_rollouts, sampled_rounds, sharing, train


def test_whitened_advantages_by_hand() -> None:
    # mean 2, standard deviation (n - 1) of 1, 2, 3 is 1
    assert whiten([1.0, 2.0, 3.0], [True] * 3).tolist() == [-1 / 1.0001, 0.0, 1 / 1.0001]
    # the unscored rollout stays out of both and gets 0
    assert whiten([1.0, 9.0, 2.0, 3.0], [True, False, True, True]).tolist() == [-1 / 1.0001, 0.0, 0.0, 1 / 1.0001]
    assert whiten([0.5, 0.5, 9.0], [True, True, False]).tolist() == [0.0, 0.0, 0.0]  # no spread
    assert whiten([4.0], [True]).tolist() == [0.0]
    assert whiten([], []).tolist() == []
    # the constants of a pool: mean 3, deviation 2
    assert whiten([1.0, 5.0], [True, True], pool=[1.0, 3.0, 5.0]).tolist() == [-2 / 2.0001, 2 / 2.0001]


def row(advantage: float) -> ExtraRow:
    return ExtraRow("p", (1, 2), RowSource("bob", 0, 0), loss="policy_gradient", advantage=advantage)


def test_plan_is_whitened_with_the_constants_of_own_rollouts_and_rows_together() -> None:
    own = [Rollout("p", index, reward, True, advantage=0.0) for index, reward in enumerate((0.0, math.nan, 1.0))]
    view = RoundView(0, "ada", 0, Rollouts.of(own), {}, whiten=True)
    plan = whitened_plan(Plan(advantages=(1.0, 0.0, 3.0), rows=(row(5.0),)), view)
    # pool 1, 3, 5: mean 3, deviation 2; the unscored rollout stays at 0
    assert plan.advantages == pytest.approx((-2 / 2.0001, 0.0, 0.0))
    assert [each.advantage for each in plan.rows] == pytest.approx([2 / 2.0001])
    kept = Plan(rows=(), metrics={"x": 1.0})
    assert whitened_plan(kept, view) is kept  # the view's advantages are whitened already


class Kept(MutualGRPOTrainer):
    """Trainer that keeps the advantages of every round."""

    def on_generated(self, batch: Any, generation: Any) -> None:
        super().on_generated(batch, generation)
        self.kept_advantages = [*getattr(self, "kept_advantages", []), batch["advantages"].clone()]


class KeptByTRL(GRPOTrainer):  # type: ignore[misc]  # TRL is followed as Any
    """TRL's trainer that keeps the advantages of every round."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.kept_advantages = [*getattr(self, "kept_advantages", []), batch["advantages"].clone()]
        return batch


@pytest.mark.slow
def test_group_scaling_then_whitening_is_normalize_then_sum_of_trl(tiny: dict[str, Path], tmp_path: Path) -> None:
    own = sharing(tmp_path / "x", "grpo")
    own = replace(own, whiten=True)
    ours = train(Kept, tiny["ada"], tmp_path / "ours", own, scale_rewards="group")
    keys = {"scale_rewards": "group", "multi_objective_aggregation": "normalize_then_sum"}
    trl = train(KeptByTRL, tiny["ada"], tmp_path / "trl", **keys)
    assert len(ours.kept_advantages) == len(trl.kept_advantages) == 3
    for mine, theirs in zip(ours.kept_advantages, trl.kept_advantages, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert max(float(round_advantages.abs().max()) for round_advantages in ours.kept_advantages) > 0.5
    weights = [dict(trainer.model.named_parameters()) for trainer in (ours, trl)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=5e-5)  # after three steps of Adam


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["prp", "hacpo", "xgrpo", "sgt", "grpo-noise"])
def test_own_batch_of_every_regime_has_mean_0_and_deviation_1(
    tiny: dict[str, Path], tmp_path: Path, regime: str
) -> None:
    publish_rollouts(tmp_path / "x", load_tokenizer(str(tiny["bob"])), sampled_rounds(8, 1))
    own = sharing(tmp_path / "x", regime, tokenizers={"bob": load_tokenizer(str(tiny["bob"]))})
    own = replace(own, whiten=True)
    trained = train(Kept, tiny["ada"], tmp_path / "out", own, scale_rewards="none", max_steps=1, **loss_keys(regime))
    values = trained.kept_advantages[0].numpy()
    rows = [extra.advantage for extra in trained.extra_rows.rows if extra.loss == "policy_gradient"]
    pool = np.concatenate([values, rows])
    assert (len(rows) > 0) == (regime in ("prp", "hacpo"))
    assert abs(pool.mean()) < 1e-3
    assert 0.97 < pool.std(ddof=1) < 1.03


def loss_keys(regime: str) -> dict[str, Any]:
    from training_harness import trainer_keys

    return {key: value for key, value in trainer_keys(regime).items() if key != "scale_rewards"}


def test_regime_that_weighs_groups_is_refused(tiny: dict[str, Path], tmp_path: Path, cli_here: Cli) -> None:
    result = cli_here(
        "train", "--regime", "swarm", "--pool", "tiny", "--set", "round.whiten_advantages=true", "--dry-run"
    )
    assert result.returncode == 2
    assert (
        "round.whiten_advantages: found true, but regime 'swarm' sets the advantages of dropped groups" in result.stderr
    )
    own = sharing(tmp_path / "x", "swarm")
    own = replace(own, whiten=True)
    with pytest.raises(UsageError, match="whiten_advantages: found true, but regime 'swarm'"):
        train(Kept, tiny["ada"], tmp_path / "out", own)


@pytest.mark.slow
def test_published_advantages_of_a_run_are_whitened(cli: Cli, tmp_path: Path) -> None:
    keys = ("round.whiten_advantages=true", "trainer.scale_rewards=none", "run.validation_limit=4")
    chosen = [word for key in keys for word in ("--set", key)]
    run = ("--regime", "xgrpo", "--pool", "tiny", "--exchange", "full", "--steps", "4", "--no-report", "--run-dir", "r")
    result = cli("train", *run, *chosen, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 4
    shards = sorted((tmp_path / "r" / "exchange").glob("*/*.parquet"))
    assert len(shards) == 8
    for shard in shards:
        table = pq.read_table(shard)
        advantages = np.array(table.column("advantage").to_pylist())
        assert len(set(table.column("reward").to_pylist())) > 1
        assert abs(advantages.mean()) < 1e-3
        assert 0.97 < advantages.std(ddof=1) < 1.03
