"""Plans from outside: made plain, so that a checkpoint gives back what was trained on, or refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mutualrl.errors import RegimeError
from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes import PPO, Band, ExtraRow, Plan, RowSource, SequenceLevel, UpperBound, check_plan, plain_state
from mutualrl.regimes.losses import bounded_loss, nll_loss, row_nll, sequence_loss, upper_bound_loss
from mutualrl.training.state import pack, unpack
from regime_views import view

SEEN = view([("p", 1.0), ("p", 0.0)])


def row(**changes: Any) -> ExtraRow:
    plain: dict[str, Any] = {"prompt_id": "p", "source": RowSource("bob", 0, 0), "token_ids": (1, 2), "loss": "nll"}
    return ExtraRow(**{**plain, **changes})


@pytest.mark.parametrize(
    "given",
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
        row(loss="policy_gradient", mean="pool", bound=SequenceLevel(0.1, 0.2)),
    ],
)
def test_a_checked_row_survives_a_checkpoint_bit_for_bit(given: ExtraRow, tmp_path: Path) -> None:
    (checked,) = check_plan(Plan(rows=(given,)), SEEN, "own").rows
    torch.save(pack(checked), tmp_path / "row.pt")
    back = unpack(torch.load(tmp_path / "row.pt", weights_only=True))
    for name in ("prompt_id", "source", "token_ids", "loss", "weight", "advantage", "bound", "mean", "text"):
        assert getattr(back, name) == getattr(checked, name), name
        assert type(getattr(back, name)) is type(getattr(checked, name)), name
    for name in ("mask", "logprobs"):
        one, other = getattr(checked, name), getattr(back, name)
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and np.array_equal(one, other))
    assert checked.advantage == float(given.advantage)
    assert isinstance(back.source, RowSource)


class Odd(PPO):
    """Bound that nobody can carry out."""


@pytest.mark.parametrize(
    ("wrong", "words"),
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
def test_a_row_that_cannot_be_carried_out_is_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(RegimeError, match="regime 'own': row 0") as error:
        check_plan(Plan(rows=(row(**wrong),)), SEEN, "own")
    assert words in str(error.value)


def test_a_state_is_what_a_checkpoint_would_give_back() -> None:
    assert plain_state({"a": [1, 2.5, None, {"b": "c"}]}, "own") == {"a": [1, 2.5, None, {"b": "c"}]}
    for state in ({"a": (1,)}, {1: 2}, {"a": float("nan")}, {"a": {1}}):
        with pytest.raises(RegimeError, match="regime 'own'"):
            plain_state(state, "own")


def test_schemas_of_a_pool_join_and_withhold() -> None:
    texts = [PublishSchema.of("text", text_above=above) for above in (0.8, 0.5)]
    both = PublishSchema.union([*texts, PublishSchema.of("token_ids", "logprobs")])
    assert both.fields == {"text", "token_ids", "logprobs"}
    assert (both.text_above, both.traced) == (0.5, True)
    rollout = Rollout("p", 0, 0.4, True, 2, 1.0, "?", "no", (1, 2), (-1.0, -1.0))
    (selected,) = both.select([rollout])
    assert selected == replace(rollout, advantage=None, prompt=None, text=None)
    assert both.select([replace(rollout, reward=0.6)])[0].text == "no"
    assert both.select([replace(rollout, reward=math.nan)])[0].text is None
    assert not PublishSchema().publishes_text(9.0)
    everything = both.complete()
    assert everything.select([rollout]) == [rollout]
    with pytest.raises(ValueError, match="found 'colour'"):
        PublishSchema.of("colour")


# ratios exp(ln 2) and exp(-ln 4) on two tokens, A = 3
LOGPS = torch.log(torch.tensor([[0.5, 0.125]], dtype=torch.float64))
BEHAVIOUR = torch.log(torch.tensor([[0.25, 0.5]], dtype=torch.float64))
MASK = torch.ones((1, 2), dtype=torch.bool)


def test_upper_bound_by_hand() -> None:
    loss = upper_bound_loss(LOGPS, BEHAVIOUR, torch.tensor([[3.0]]), cap=1.0)
    assert loss[0].tolist() == pytest.approx([-1.0 * 3 * math.log(0.5), -0.25 * 3 * math.log(0.125)])


def test_sequence_level_by_hand() -> None:
    # mean log-ratio (ln 2 - ln 4) / 2 = -ln 2 / 2: s = 1 / sqrt 2, cut from below at .9 where A < 0
    for advantage, expected in ((3.0, -3 / math.sqrt(2)), (-3.0, 3 * 0.9)):
        loss = sequence_loss(LOGPS, BEHAVIOUR, torch.tensor([[advantage]]), MASK, 0.1, 0.2)
        assert loss[0].tolist() == pytest.approx([expected] * 2)


def test_each_bound_has_its_loss_and_trls_own_is_not_ours() -> None:
    advantages = torch.tensor([[1.0]])
    for bound in (Band(), UpperBound(1.5), SequenceLevel()):
        assert bounded_loss(bound, LOGPS, BEHAVIOUR, advantages, MASK, low=0.2, high=0.2).shape == (1, 2)
    with pytest.raises(ValueError, match="TRL's own"):
        bounded_loss(PPO(), LOGPS, BEHAVIOUR, advantages, MASK, low=0.2, high=0.2)


def test_rows_weigh_as_they_say_and_sums_are_over_tokens() -> None:
    logps = torch.tensor([[-1.0, -3.0], [-4.0, -9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    assert row_nll(logps, mask).tolist() == [2.0, 4.0]
    assert row_nll(logps, mask, reduce="sum").tolist() == [4.0, 4.0]
    weights = torch.tensor([0.5, 0.25])
    assert nll_loss(row_nll(logps, mask), weight=weights, count=2, ranks=1).item() == pytest.approx((1.0 + 1.0) / 2)
