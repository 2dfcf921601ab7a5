"""HACPO: capability, weighted baseline, peer rows. Values computed by hand from arXiv 2603.02604."""

from __future__ import annotations

import logging
import math

import pytest

from mutualrl.errors import DataError
from mutualrl.regimes import Stepwise
from mutualrl.regimes.hacpo import FLOOR, HACPO, capability_weights
from regime_views import Peer, plan, view

#: rewards 1, 0, 0, 0: a quarter of ada's rollouts succeed
OWN = [("p", 1.0), ("p", 0.0), ("p", 0.0), ("p", 0.0)]


def bob(*rewards: float) -> Peer:
    return Peer([("p", reward, "xy", (1, 2, 3), (-1.0, -2.0, -3.0), True) for reward in rewards])


def test_baseline_weights_peer_rewards_by_capability() -> None:
    # P_ada = 1/4, P_bob = 1/2, so bob's w = 1/2. b = (1 + 0 + 0 + 0 + 1/2 + 0) / 6 = 1/4; the pooled rewards
    # 1, 0, 0, 0, 1, 0 have mean 1/3 and standard deviation sqrt(4/3 / 5).
    result = plan(view(OWN, {"bob": bob(1.0, 0.0)}), HACPO())
    std = math.sqrt((2 * (2 / 3) ** 2 + 4 * (1 / 3) ** 2) / 5) + 1e-6
    assert result.advantages == pytest.approx([0.75 / std, *[-0.25 / std] * 3])
    assert [row.advantage for row in result.rows] == pytest.approx([0.75 / std, -0.25 / std])
    assert [row.weight for row in result.rows] == [2.0, 2.0]  # P_source / P_learner
    assert result.rows[0].logprobs is not None
    assert result.rows[0].logprobs.tolist() == [-2.0, -2.0]  # the source's mean, on each of the learner's two tokens
    assert result.rows[0].bound == Stepwise(0.2, 0.025, 1.0, 10.0)
    assert result.metrics["hacpo/capability"] == 0.25
    assert result.state == {"shares": {"ada": [0.25], "bob": [0.5]}}


def test_baseline_is_the_pool_mean_if_capabilities_are_equal() -> None:
    result = plan(view(OWN, {"bob": bob(1.0, 0.0, 0.0, 0.0)}), HACPO())
    std = math.sqrt((2 * 0.75**2 + 6 * 0.25**2) / 7) + 1e-6
    assert result.advantages == pytest.approx([0.75 / std, *[-0.25 / std] * 3])
    assert {row.weight for row in result.rows} == {1.0}


def test_equal_rewards_give_0_and_a_released_baseline_above_1_is_the_learners_mean() -> None:
    rich = [("p", 1.0)] * 3 + [("q", 0.0)] * 9  # P_ada = 1/4, P_bob = 1/8, so w = 2
    peer = Peer([("p", 1.0, "x", (1,), (-1.0,), True)] + [("q", 0.0, "x", (1,), (-1.0,), True)] * 7)
    result = plan(view(rich, {"bob": peer}), HACPO())
    assert result.advantages is not None
    assert set(result.advantages) == {0.0}
    mixed = [("p", 1.0), ("p", 1.0), ("p", 0.0)] + [("q", 0.0)] * 9  # P_ada = 1/6
    many = [("p", 1.0, "x", (1,), (-1.0,), True)] * 3 + [("q", 0.0, "x", (1,), (-1.0,), True)] * 97
    result = plan(view(mixed, {"bob": Peer(many)}), HACPO(baseline="released"))
    # w = (1/6) / (3/100) = 50/9: b = (2 + 3 * 50/9) / 6 > 1, hence ada's own mean, 2/3
    std = math.sqrt((5 * (1 / 6) ** 2 + (5 / 6) ** 2) / 5) + 1e-6
    assert result.advantages is not None
    assert result.advantages[:3] == pytest.approx([1 / 3 / std, 1 / 3 / std, -2 / 3 / std])
    paper_advantages = plan(view(mixed, {"bob": Peer(many)}), HACPO()).advantages
    assert paper_advantages is not None
    b = (2 + 3 * 50 / 9) / 6
    assert paper_advantages[:3] == pytest.approx([(1 - b) / std, (1 - b) / std, -b / std])


def test_released_baseline_clamps_the_capability_ratio_and_the_papers_does_not() -> None:
    able = {"ada": 0.9, "bob": 0.05, "cyd": 1e-8}
    released = capability_weights(able, "ada", HACPO(baseline="released"), warm=False)
    assert released == ({"ada": 1.0, "bob": 10.0, "cyd": 10.0},) * 2
    rows, baseline = capability_weights(able, "ada", HACPO(), warm=False)
    assert rows == {"ada": 1.0, "bob": 10.0, "cyd": 10.0}
    assert baseline["bob"] == pytest.approx(18.0)
    assert baseline["cyd"] == 10.0  # the floor is not a measurement
    assert capability_weights(able, "ada", HACPO(), warm=True)[0] == dict.fromkeys(able, 1.0)


def test_capability_is_a_window_mean_and_treated_as_equal_during_warmup() -> None:
    settings = HACPO(window=2, warmup_rounds=3)
    before = {"shares": {"ada": [0.0, 1.0], "bob": [1.0, 1.0]}}
    result = plan(view(OWN, {"bob": bob(1.0, 0.0)}, state=before, round=2), settings)
    assert result.state == {"shares": {"ada": [1.0, 0.25], "bob": [1.0, 0.5]}}
    assert result.metrics["hacpo/capability"] == pytest.approx(0.625)
    assert {row.weight for row in result.rows} == {1.0}
    after = plan(view(OWN, {"bob": bob(1.0, 0.0)}, state=before, round=3), settings)
    assert [row.weight for row in after.rows] == pytest.approx([0.75 / 0.625] * 2)


def test_capability_of_a_policy_without_success_is_floored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = plan(view(OWN, {"bob": bob(0.0, 0.0)}), HACPO())
    assert f"policy 'bob' had no reward above 0 in its last 5 rounds: its capability is {FLOOR:g}" in caplog.text
    assert [row.weight for row in result.rows] == pytest.approx([0.1] * 2)  # 1 / ratio_high


def test_unfit_rows_leave_the_pool_and_a_missing_trace_is_an_error() -> None:
    def fit(text: str, ended: bool) -> tuple[int, ...] | None:
        return None if text == "long" else (1,)

    rows = [("p", 1.0, "long", (1,), (-1.0,), True), ("p", 0.0, "ok", (1,), (float("nan"),), True)]
    result = plan(view(OWN, {"bob": Peer(rows)}, fit=fit), HACPO())
    assert (result.rows, result.metrics["hacpo/unencodable"]) == ((), 2.0)
    with pytest.raises(DataError, match="'bob' published no logprobs of rollout 0 on 'p'; regime hacpo needs"):
        plan(view(OWN, {"bob": Peer([("p", 1.0, "x", None, None, True)])}), HACPO())


def test_trainer_must_use_the_gspo_loss() -> None:
    problems = dict(HACPO().problems({"importance_sampling_level": "token", "loss_type": "dapo"}))
    assert "expects 'sequence'" in problems["importance_sampling_level"]
    assert "expected 'grpo'" in problems["loss_type"]
    assert not HACPO().problems({"importance_sampling_level": "sequence", "loss_type": "grpo"})
    with pytest.raises(ValueError, match="has no effect with clip_low: 0"):
        HACPO(clip_low=0.0)


def test_negative_rewards_of_a_failing_peer_do_not_blow_up_the_baseline() -> None:
    result = plan(view([("p", 1.0), ("p", -1.0)], {"bob": bob(-1.0, -1.0)}), HACPO())
    assert result.advantages is not None
    assert result.metrics["hacpo/advantage_max"] < 10
    infinite = Peer([("p", 1.0, "x", (1,), (float("-inf"),), True)])
    assert plan(view(OWN, {"bob": infinite}), HACPO()).metrics["hacpo/unencodable"] == 1.0
