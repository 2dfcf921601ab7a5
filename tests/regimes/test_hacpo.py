"""HACPO: capability, the weighed baseline, rows of peers. Numbers worked by hand from arXiv 2603.02604."""

from __future__ import annotations

import logging
import math

import pytest

from mutualrl.errors import DataError
from mutualrl.regimes import Stepwise, get_regime
from mutualrl.regimes.hacpo import FLOOR, HACPOSettings, capability_weights, plan
from regime_views import Peer, view

#: rewards 1, 0, 0, 0: a quarter of ada's rollouts succeed
OWN = [("p", 1.0), ("p", 0.0), ("p", 0.0), ("p", 0.0)]


def bob(*rewards: float) -> Peer:
    return Peer([("p", reward, "xy", (1, 2, 3), (-1.0, -2.0, -3.0), True) for reward in rewards])


def test_the_baseline_weighs_the_peers_rewards_by_capability_by_hand() -> None:
    # P_ada = 1/4, P_bob = 1/2, so w of bob's = 1/2. b = (1 + 0 + 0 + 0 + 1/2 + 0) / 6 = 1/4; the pooled rewards
    # 1, 0, 0, 0, 1, 0 have mean 1/3 and standard deviation sqrt(4/3 / 5).
    made = plan(view(OWN, {"bob": bob(1.0, 0.0)}), HACPOSettings())
    deviation = math.sqrt((2 * (2 / 3) ** 2 + 4 * (1 / 3) ** 2) / 5) + 1e-6
    assert made.advantages == pytest.approx([0.75 / deviation, *[-0.25 / deviation] * 3])
    assert [row.advantage for row in made.rows] == pytest.approx([0.75 / deviation, -0.25 / deviation])
    assert [row.weight for row in made.rows] == [2.0, 2.0]  # P_source / P_learner
    assert made.rows[0].logprobs is not None
    assert made.rows[0].logprobs.tolist() == [-2.0, -2.0]  # the source's mean, over the learner's two tokens
    assert made.rows[0].bound == Stepwise(0.2, 0.025, 1.0, 10.0)
    assert made.metrics["hacpo/capability"] == 0.25
    assert made.state == {"shares": {"ada": [0.25], "bob": [0.5]}}


def test_with_equal_capabilities_it_is_the_mean_over_the_pool() -> None:
    made = plan(view(OWN, {"bob": bob(1.0, 0.0, 0.0, 0.0)}), HACPOSettings())
    deviation = math.sqrt((2 * 0.75**2 + 6 * 0.25**2) / 7) + 1e-6
    assert made.advantages == pytest.approx([0.75 / deviation, *[-0.25 / deviation] * 3])
    assert {row.weight for row in made.rows} == {1.0}


def test_equal_rewards_have_the_plain_mean_and_a_baseline_above_1_is_the_learners_own() -> None:
    rich = [("p", 1.0)] * 3 + [("q", 0.0)] * 9  # P_ada = 1/4, P_bob = 1/8, so w = 2
    peer = Peer([("p", 1.0, "x", (1,), (-1.0,), True)] + [("q", 0.0, "x", (1,), (-1.0,), True)] * 7)
    made = plan(view(rich, {"bob": peer}), HACPOSettings())
    assert made.advantages is not None
    assert set(made.advantages) == {0.0}
    mixed = [("p", 1.0), ("p", 1.0), ("p", 0.0)] + [("q", 0.0)] * 9  # P_ada = 1/6
    many = [("p", 1.0, "x", (1,), (-1.0,), True)] * 3 + [("q", 0.0, "x", (1,), (-1.0,), True)] * 97
    made = plan(view(mixed, {"bob": Peer(many)}), HACPOSettings(baseline="released"))
    # w = (1/6) / (3/100) = 50/9: b = (2 + 3 * 50/9) / 6 > 1, hence ada's own mean, 2/3
    deviation = math.sqrt((5 * (1 / 6) ** 2 + (5 / 6) ** 2) / 5) + 1e-6
    assert made.advantages is not None
    assert made.advantages[:3] == pytest.approx([1 / 3 / deviation, 1 / 3 / deviation, -2 / 3 / deviation])
    as_the_paper = plan(view(mixed, {"bob": Peer(many)}), HACPOSettings()).advantages
    assert as_the_paper is not None
    b = (2 + 3 * 50 / 9) / 6
    assert as_the_paper[:3] == pytest.approx([(1 - b) / deviation, (1 - b) / deviation, -b / deviation])


def test_the_released_baseline_clamps_the_ratio_of_capabilities_and_the_papers_does_not() -> None:
    able = {"ada": 0.9, "bob": 0.05, "cyd": 1e-8}
    released = capability_weights(able, "ada", HACPOSettings(baseline="released"), warm=False)
    assert released == ({"ada": 1.0, "bob": 10.0, "cyd": 10.0},) * 2
    rows, baseline = capability_weights(able, "ada", HACPOSettings(), warm=False)
    assert rows == {"ada": 1.0, "bob": 10.0, "cyd": 10.0}
    assert baseline["bob"] == pytest.approx(18.0)
    assert baseline["cyd"] == 10.0  # the floor is no measurement
    assert capability_weights(able, "ada", HACPOSettings(), warm=True)[0] == dict.fromkeys(able, 1.0)


def test_capability_is_a_mean_over_the_window_and_counts_as_equal_while_warming_up() -> None:
    settings = HACPOSettings(window=2, warmup_rounds=3)
    before = {"shares": {"ada": [0.0, 1.0], "bob": [1.0, 1.0]}}
    made = plan(view(OWN, {"bob": bob(1.0, 0.0)}, state=before, round=2), settings)
    assert made.state == {"shares": {"ada": [1.0, 0.25], "bob": [1.0, 0.5]}}
    assert made.metrics["hacpo/capability"] == pytest.approx(0.625)
    assert {row.weight for row in made.rows} == {1.0}
    after = plan(view(OWN, {"bob": bob(1.0, 0.0)}, state=before, round=3), settings)
    assert [row.weight for row in after.rows] == pytest.approx([0.75 / 0.625] * 2)


def test_a_policy_that_never_succeeds_is_floored_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = plan(view(OWN, {"bob": bob(0.0, 0.0)}), HACPOSettings())
    assert f"policy 'bob' had no reward above 0 in its last 5 rounds: its capability is {FLOOR:g}" in caplog.text
    assert [row.weight for row in made.rows] == pytest.approx([0.1] * 2)  # 1 / ratio_high


def test_a_row_that_the_learner_cannot_have_leaves_the_pool_and_a_missing_trace_is_named() -> None:
    def fit(text: str, ended: bool) -> tuple[int, ...] | None:
        return None if text == "long" else (1,)

    rows = [("p", 1.0, "long", (1,), (-1.0,), True), ("p", 0.0, "ok", (1,), (float("nan"),), True)]
    made = plan(view(OWN, {"bob": Peer(rows)}, fit=fit), HACPOSettings())
    assert (made.rows, made.metrics["hacpo/unfit"]) == ((), 2.0)
    with pytest.raises(DataError, match="'bob' published no text or trace of rollout 0 on 'p'; regime hacpo needs"):
        plan(view(OWN, {"bob": Peer([("p", 1.0, "x", None, None, True)])}), HACPOSettings())


def test_the_trainer_must_have_gspos_loss() -> None:
    check, settings = get_regime("hacpo").check, HACPOSettings()
    found = dict(check(settings, {"importance_sampling_level": "token", "loss_type": "dapo"}))
    assert "expects 'sequence'" in found["importance_sampling_level"]
    assert "expected 'grpo'" in found["loss_type"]
    assert not check(settings, {"importance_sampling_level": "sequence", "loss_type": "grpo"})
    with pytest.raises(ValueError, match="has no effect with clip_low: 0"):
        HACPOSettings(clip_low=0.0)


def test_negative_rewards_of_a_peer_that_never_succeeds_do_not_blow_up_the_baseline() -> None:
    made = plan(view([("p", 1.0), ("p", -1.0)], {"bob": bob(-1.0, -1.0)}), HACPOSettings())
    assert made.advantages is not None
    assert made.metrics["hacpo/advantage_max"] < 10
    infinite = Peer([("p", 1.0, "x", (1,), (float("-inf"),), True)])
    assert plan(view(OWN, {"bob": infinite}), HACPOSettings()).metrics["hacpo/unfit"] == 1.0
