"""Plans of user regimes: converted to plain values that a checkpoint restores exactly, or rejected by row."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mutualrl.diagnostics.regime_check import with_results
from mutualrl.errors import RegimeError
from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes import (
    PPO,
    Band,
    ExtraRow,
    Plan,
    Regime,
    Requests,
    RoundView,
    RowSource,
    UpperBound,
    check_plan,
    plain_state,
)
from mutualrl.regimes.losses import bounded_loss, nll_loss, row_nll, upper_bound_loss
from mutualrl.regimes.prp import PRP
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.xgrpo import XGRPO
from mutualrl.rollouts import Rollouts
from mutualrl.tasks import TaskSource, get_task
from mutualrl.training.extra_rows import pack, unpack
from mutualrl.trajectory import Trajectory
from regime_views import view

ROUND_VIEW = view([("p", 1.0), ("p", 0.0)])


def row(**changes: Any) -> ExtraRow:
    defaults: dict[str, Any] = {"prompt_id": "p", "source": RowSource("bob", 0, 0), "token_ids": (1, 2), "loss": "nll"}
    return ExtraRow(**{**defaults, **changes})


@pytest.mark.parametrize(
    "extra_row",
    [
        row(token_ids=tuple(np.array([3, 4])), weight=np.float32(0.1), source=("bob", np.int64(2), 5)),
        row(
            loss="policy_gradient",
            mean="pool",
            advantage=np.float32(0.3),
            bound=PPO(np.float64(4.0)),
            logprobs=np.array([-0.5, -1.5]),
            mask=[True, False],
        ),
        row(loss="policy_gradient", mean="pool", bound=Band(), mask=np.arange(4)[::2] > 0),
        row(loss="policy_gradient", mean="pool", bound=UpperBound(2)),
    ],
)
def test_checked_row_survives_a_checkpoint_bit_for_bit(extra_row: ExtraRow, tmp_path: Path) -> None:
    (checked,) = check_plan(Plan(rows=(extra_row,)), ROUND_VIEW, "own").rows
    torch.save(pack(checked), tmp_path / "row.pt")
    restored = unpack(torch.load(tmp_path / "row.pt", weights_only=True))
    for name in ("prompt_id", "source", "loss", "weight", "advantage", "bound", "mean", "trajectory"):
        assert getattr(restored, name) == getattr(checked, name), name
        assert type(getattr(restored, name)) is type(getattr(checked, name)), name
    for name in ("token_ids", "mask", "logprobs"):
        one, other = getattr(checked, name), getattr(restored, name)
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and np.array_equal(one, other))
    assert checked.advantage == float(extra_row.advantage)
    assert isinstance(restored.source, RowSource)


class Odd(PPO):
    """Bound without an implementation."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_id": "q"}, "'q' is not in the round"),
        ({"token_ids": ()}, "has no token ids"),
        ({"mask": np.ones(3, dtype=bool)}, "mask of shape"),
        ({"logprobs": np.array([0.0, np.nan])}, "not finite"),
        ({"weight": math.inf}, "expected finite"),
        ({"loss": "other"}, "expected 'policy_gradient' or 'nll'"),
        ({"loss": "policy_gradient"}, "expected 'pool'"),
        ({"bound": Odd(2.0)}, "expected one of: PPO, Band"),
        ({"source": ("bob",)}, "not enough values"),
    ],
)
def test_invalid_row_is_rejected_by_index(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RegimeError, match="regime 'own': row 0") as error:
        check_plan(Plan(rows=(row(**changes),)), ROUND_VIEW, "own")
    assert message in str(error.value)


def test_state_must_survive_a_checkpoint_unchanged() -> None:
    assert plain_state({"a": [1, 2.5, None, {"b": "c"}]}, "own") == {"a": [1, 2.5, None, {"b": "c"}]}
    for state in ({"a": (1,)}, {1: 2}, {"a": float("nan")}, {"a": {1}}):
        with pytest.raises(RegimeError, match="regime 'own'"):
            plain_state(state, "own")


def test_union_of_schemas_has_all_fields_and_withholds_low_reward_texts() -> None:
    texts = [PublishSchema.of("text", text_above=above) for above in (0.8, 0.5)]
    union = PublishSchema.union([*texts, PublishSchema.of("token_ids", "logprobs")])
    assert union.fields == {"text", "token_ids", "logprobs"}
    assert (union.text_above, union.traced) == (0.5, True)
    rollout = Rollout("p", 0, 0.4, True, 2, 1.0, "?", Trajectory.of_text("no"), (1, 2), (-1.0, -1.0))
    (selected,) = Rollouts.of([rollout]).published(union)
    assert (selected.advantage, selected.prompt, selected.text) == (None, None, None)
    assert selected.token_ids is not None
    assert (selected.token_ids.tolist(), selected.reward, selected.length) == ([1, 2], 0.4, 2)
    more = [replace(rollout, reward=reward) for reward in (0.6, math.nan, 0.5)]
    assert Rollouts.of(more).published(union).texts() == ["no", None, None]
    assert not PublishSchema().publishes_text(9.0)
    everything = union.complete()
    assert Rollouts.of([rollout]).published(everything).table() == Rollouts.of([rollout]).table()
    with pytest.raises(ValueError, match="found 'colour'"):
        PublishSchema.of("colour")


# ratios exp(ln 2) and exp(-ln 4) on two tokens, A = 3
LOGPS = torch.log(torch.tensor([[0.5, 0.125]], dtype=torch.float64))
BEHAVIOUR = torch.log(torch.tensor([[0.25, 0.5]], dtype=torch.float64))
MASK = torch.ones((1, 2), dtype=torch.bool)


def test_upper_bound_loss_matches_hand_computed_values() -> None:
    loss = upper_bound_loss(LOGPS, BEHAVIOUR, torch.tensor([[3.0]]), cap=1.0)
    assert loss[0].tolist() == pytest.approx([-1.0 * 3 * math.log(0.5), -0.25 * 3 * math.log(0.125)])


def test_each_bound_has_a_loss_except_ppo_which_is_trls() -> None:
    advantages = torch.tensor([[1.0]])
    for bound in (Band(), UpperBound(1.5)):
        assert bounded_loss(bound, LOGPS, BEHAVIOUR, advantages, MASK, low=0.2, high=0.2).shape == (1, 2)
    with pytest.raises(ValueError, match="TRL's own"):
        bounded_loss(PPO(), LOGPS, BEHAVIOUR, advantages, MASK, low=0.2, high=0.2)


def test_nll_loss_applies_row_weights_and_sum_reduces_over_tokens() -> None:
    logps = torch.tensor([[-1.0, -3.0], [-4.0, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    assert row_nll(logps, mask).tolist() == [2.0, 4.0]
    assert row_nll(logps, mask, reduce="sum").tolist() == [4.0, 4.0]
    weights = torch.tensor([0.5, 0.25])
    assert nll_loss(row_nll(logps, mask), weight=weights, count=2, ranks=1).item() == pytest.approx((1.0 + 1.0) / 2)


class TwoPhases(Regime):
    """Asks for a passage's NLL, and only then for the reward of a response, by what the NLL was."""

    name = "two-phases"

    def requests(self, view: RoundView) -> Requests:
        passage = (view.prompt_ids[0], (1, 2))
        if passage not in view.results.nll:
            return Requests(nll=(passage,))
        low = view.results.nll[passage] < 100
        return Requests(nll=(passage,), rewards=((view.prompt_ids[0], "low" if low else "high", True),))


def test_requests_are_repeated_until_nothing_new_is_asked() -> None:
    prompt_id = next(iter(get_task("arithmetic").read("train", TaskSource()).prompts)).id
    round_view = view([(prompt_id, 1.0)])
    assert not any(Regime().requests(round_view))
    results = with_results(TwoPhases(), round_view).results
    assert list(results.nll) == [(prompt_id, (1, 2))]
    assert list(results.rewards) == [(prompt_id, "low", True)]
    assert not any(TwoPhases().requests(replace(round_view, results=results)).without(results))


def test_settings_of_a_class_declare_when_they_act_and_what_is_a_variant() -> None:
    assert SGT.acts_with()["margin"] == ("gate", "relative")
    assert SGT.variants() == {"gate": ("none",), "teacher": ("source", "own")}
    assert set(SGT.acts_with()) < set(SGT.model_fields)
    assert [regime().needs().advantages for regime in (SGT, XGRPO, PRP)] == ["keeps", "adjusts", "builds the batch"]
    assert [regime().needs().changes_advantages for regime in (SGT, XGRPO, PRP)] == [False, True, True]
