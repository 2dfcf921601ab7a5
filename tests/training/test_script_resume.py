"""A user's own script: transformers' checkpoints and `resume_from_checkpoint`, inside a generation batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import FencedError, UsageError
from mutualrl.records import Rollout
from mutualrl.regimes import parts_of
from mutualrl.training import MutualGRPOTrainer, Sharing
from training_harness import publish_rollouts, sampled_rounds, train, trainer_keys

pytestmark = pytest.mark.slow
#: a round is used for four optimizer steps; the checkpoint is written after the third
KEYS: dict[str, Any] = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 3,
    "steps_per_generation": 2,
    "num_iterations": 2,
}


def weights(trainer: MutualGRPOTrainer) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = trainer.model.state_dict()
    return state


@pytest.mark.parametrize(
    ("regime", "settings"),
    [
        (None, {}),
        ("sgt", {}),
        ("prp", {}),
        ("hinted", {"samples": 2}),
        pytest.param("hinted", {"loss": "policy_gradient", "samples": 2}, marks=pytest.mark.extended),
        pytest.param("sgt", {"memory": 3, "pick": "lowest_nll"}, marks=pytest.mark.extended),
        pytest.param("prp", {"trust": "band"}, marks=pytest.mark.extended),
        pytest.param("hacpo", {}, marks=pytest.mark.extended),
        pytest.param("swarm", {}, marks=pytest.mark.extended),
        pytest.param("xgrpo+sgt", {"sgt": {"memory": 3}}, marks=pytest.mark.extended),
    ],
)
def test_script_resumes_from_a_transformers_checkpoint(
    tiny: dict[str, Path], tmp_path: Path, regime: str | None, settings: dict[str, Any]
) -> None:
    tokenizers = {name: load_tokenizer(str(path)) for name, path in tiny.items()}

    def shared(resume: bool) -> Sharing | None:
        if regime is None:
            return None
        return Sharing.over(tmp_path / "x", "ada", ["bob"], regime, tokenizers=tokenizers, resume=resume, **settings)

    if regime is not None:
        publish_rollouts(tmp_path / "x" / "exchange", tokenizers["bob"], sampled_rounds(16, 2, repeat=4))
    keys = dict(KEYS)
    for part in () if regime is None else parts_of(regime):
        keys |= trainer_keys(part)
    unbroken = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "out", shared(False), **keys)
    checkpoint = tmp_path / "out" / "checkpoint-3"
    assert (checkpoint / "mutualrl_state_0.pt").exists()
    resumed = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "again", shared(True), resume=checkpoint, **keys)
    assert all(torch.equal(a, b) for a, b in zip(weights(unbroken).values(), weights(resumed).values(), strict=True))
    losses = [row["loss"] for row in unbroken.kept if "loss" in row]
    assert [row["loss"] for row in resumed.kept if "loss" in row] == losses[3:]


def test_resumed_script_fences_the_previous_one(tmp_path: Path) -> None:
    first = Sharing.over(tmp_path, "ada", ["bob"], "sgt")
    first.link.exchange.publish(0, [Rollout("p", 0, 1.0, True)], 0)
    with pytest.raises(UsageError, match="has rounds of an earlier run"):
        Sharing.over(tmp_path, "ada", ["bob"], "sgt")
    second = Sharing.over(tmp_path, "ada", ["bob"], "sgt", resume=True)
    second.claim_attempt(SimpleNamespace(is_main_process=True))
    assert second.link.exchange.attempt == 1
    with pytest.raises(FencedError):
        first.link.exchange.publish(1, [Rollout("p", 0, 1.0, True)], 0)
    second.claim_attempt(SimpleNamespace(is_main_process=True))
    assert second.link.exchange.attempt == 1  # claimed only once
