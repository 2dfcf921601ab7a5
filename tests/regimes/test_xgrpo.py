from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.regimes.advantages import pool_advantages
from mutualrl.regimes.grpo_noise import GRPONoise
from mutualrl.regimes.xgrpo import XGRPO, effective_advantages, shuffled, variance_margin
from regime_views import Peer, plan, view

PLAIN = {"length_correction": 0.0, "advantage_clip": None}
OWN = [("p", 1.0), ("p", 0.0), ("q", 0.0), ("q", 0.0)]
BOB = [("p", 1.0), ("p", 1.0), ("q", 1.0), ("q", 0.0)]


def test_pool_advantages_match_hand_computed_values() -> None:
    # p: pool 1, 0, 1, 1: mean 3/4, standard deviation 1/2. q: pool 0, 0, 1, 0: mean 1/4, standard deviation 1/2.
    got = plan(view(OWN, {"bob": Peer(BOB)}), XGRPO(mix=1.0, **PLAIN)).advantages
    assert got == pytest.approx([0.25 / 0.5001, -0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])


def test_mix_is_a_convex_combination_of_local_and_pool_advantages() -> None:
    # p's own rewards: mean 1/2, standard deviation sqrt(1/2)
    local = 0.5 / (math.sqrt(0.5) + 1e-4)
    got = plan(view(OWN, {"bob": Peer(BOB)}), XGRPO(mix=0.2, **PLAIN)).advantages
    assert got is not None
    assert got[0] == pytest.approx(0.8 * local + 0.2 * 0.25 / 0.5001)
    assert got[2] == pytest.approx(0.2 * -0.25 / 0.5001)  # a group of equal rewards has only the pool's advantage


def test_unscaled_leave_one_out_matches_hand_computed_values() -> None:
    settings = XGRPO(mix=1.0, scale="none", baseline="leave_one_out", **PLAIN)
    got = plan(view(OWN, {"bob": Peer(BOB)}), settings).advantages
    assert got == pytest.approx([1 - 2 / 3, 0 - 3 / 3, 0 - 1 / 3, 0 - 1 / 3])


def test_scale_batch_divides_by_the_standard_deviation_of_all_rewards() -> None:
    rewards = [r for _, r in (*OWN, *BOB)]
    got = plan(view(OWN, {"bob": Peer(BOB)}), XGRPO(mix=1.0, scale="batch", **PLAIN)).advantages
    assert got is not None
    assert got[0] == pytest.approx(0.25 / (np.std(rewards, ddof=1) + 1e-4))


def test_scale_defaults_to_the_trainers() -> None:
    peers = {"bob": Peer(BOB)}
    by_trainer = plan(view(OWN, peers, scale="none"), XGRPO(mix=1.0, **PLAIN)).advantages
    assert by_trainer == plan(view(OWN, peers), XGRPO(mix=1.0, scale="none", **PLAIN)).advantages


def test_length_correction_and_clip_match_hand_computed_values() -> None:
    got = effective_advantages(
        np.array([1.0, -1.0, 8.0]),
        np.zeros(3),
        np.array([4.0, 1.0, 1.0]),
        XGRPO(mix=0.0, length_correction=0.5, advantage_clip=5.0),
    )
    assert got == pytest.approx([math.sqrt(2 / 4), -math.sqrt(2), 5.0])  # mean length 2


def test_empty_completion_counts_as_one_token() -> None:
    got = effective_advantages(np.array([1.0, 1.0]), np.zeros(2), np.array([0.0, 4.0]), XGRPO(mix=0.0))
    assert got[0] == pytest.approx(2**0.1)


@given(st.lists(st.floats(-4.5, 4.5, width=32), min_size=2, max_size=8), st.lists(st.integers(0, 9), min_size=8))
def test_mix_0_without_length_correction_is_bit_exact(local: list[float], lengths: list[int]) -> None:
    got = effective_advantages(
        np.array(local),
        np.full(len(local), 7.7),
        np.array(lengths[: len(local)], dtype=float),
        XGRPO(mix=0.0, length_correction=0.0),
    )
    assert got.tolist() == local


def test_plan_does_not_depend_on_the_order_of_peers() -> None:
    eve = [("p", 0.0), ("p", 0.0), ("q", 1.0), ("q", 1.0)]
    for pool in ("matched", "shuffled"):
        settings = XGRPO(pool=pool)
        one = plan(view(OWN, {"bob": Peer(BOB), "eve": Peer(eve)}), settings)
        other = plan(view(OWN, {"eve": Peer(eve), "bob": Peer(BOB)}), settings)
        assert one == other


def test_shuffling_permutes_whole_pools_and_depends_only_on_the_seed() -> None:
    pools = {f"p{i}": [float(i), float(i) / 2] for i in range(6)}
    permuted = shuffled(pools, np.random.default_rng(0))
    assert sorted(map(tuple, permuted.values())) == sorted(map(tuple, pools.values()))
    assert permuted != pools
    assert permuted == shuffled(dict(reversed(pools.items())), np.random.default_rng(0))


def test_shuffled_pools_differ_between_rounds_and_learners() -> None:
    own = [(f"p{i}", float(i % 2)) for i in range(12) for _ in range(2)]
    peer = {"bob": Peer([(f"p{i}", float(i > 5)) for i in range(12) for _ in range(2)])}
    settings = XGRPO(mix=1.0, pool="shuffled")
    first = plan(view(own, peer), settings).advantages
    assert first == plan(view(own, peer), settings).advantages
    assert first != plan(view(own, peer, round=1), settings).advantages
    assert first != plan(view(own, peer, learner="bob"), settings).advantages


def test_metrics_report_sign_flips_and_advantage_changes() -> None:
    # the learner's 1, 0, 0 on p -> local +, -, -; all peer rewards are 2, so the success is below the pool mean
    got = plan(view([("p", 1.0), ("p", 0.0), ("p", 0.0)], {"bob": Peer([("p", 2.0)] * 5)}), XGRPO(mix=1.0, **PLAIN))
    assert got.metrics["xgrpo/sign_flips"] == pytest.approx(1 / 3)
    assert got.advantages is not None
    change = np.abs(np.array(got.advantages) - view([("p", 1.0), ("p", 0.0), ("p", 0.0)]).advantages).mean()
    assert got.metrics["xgrpo/advantage_change"] == pytest.approx(change)


def test_unscorable_rollout_has_advantage_0_and_is_excluded_from_means() -> None:
    got = plan(
        view([("p", math.nan), ("p", 1.0)], {"bob": Peer([("p", 0.0), ("p", math.nan)])}),
        XGRPO(mix=1.0, scale="none", **PLAIN),
    ).advantages
    assert got == (0.0, 0.5)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=9), st.floats(-3, 3))
def test_equal_rewards_give_0_and_other_advantages_sum_to_the_shift(rewards: list[float], shift: float) -> None:
    got = pool_advantages(rewards, rewards, scale="group", shift=shift)
    if len(set(rewards)) == 1:
        assert got.tolist() == [0.0] * len(rewards)
    else:
        standard_deviation = np.std(rewards, ddof=1) + 1e-4
        assert (got.sum() * standard_deviation) == pytest.approx(-shift * len(rewards), abs=1e-9)


def test_noise_shifts_each_prompts_mean_by_one_draw() -> None:
    own = [("p", 1.0), ("p", 0.0), ("q", 1.0), ("q", 1.0), ("r", 0.0), ("r", 1.0)]
    got = plan(view(own, scale="none"), GRPONoise(noise=0.5)).advantages
    assert got is not None
    shift_p, shift_r = got[0] - 0.5, got[4] + 0.5
    assert got[1] == pytest.approx(-0.5 + shift_p)
    assert shift_p != 0
    assert shift_p != shift_r
    exempt = plan(view(own, scale="none"), GRPONoise(noise=0.5, equal_groups="exempt")).advantages
    assert exempt is not None
    assert exempt[2:4] == (0.0, 0.0)
    assert (*exempt[:2], *exempt[4:]) == (*got[:2], *got[4:])


def test_papers_noise_also_shifts_groups_of_equal_rewards() -> None:
    own = [("q", 1.0), ("q", 1.0), ("r", 0.0), ("r", 1.0)]
    plain = plan(view(own, scale="none"), GRPONoise(noise=0.5)).advantages
    assert plain is not None
    shift = -plain[0]
    assert plain[:2] == (-shift, -shift)
    by_group = plan(view(own, scale="group"), GRPONoise(noise=0.5)).advantages
    assert by_group is not None
    assert by_group[0] == pytest.approx(-shift / 1e-4)  # the group's standard deviation is 0
    by_batch = plan(view(own, scale="batch"), GRPONoise(noise=0.5)).advantages
    assert by_batch is not None
    assert by_batch[0] == pytest.approx(-shift / (0.5 + 1e-4))  # the standard deviation of (1, 1, 0, 1) is 0.5
    without_noise = plan(view([("q", 0.1)] * 7, scale="group"), GRPONoise(noise=0.0)).advantages
    assert without_noise == (0.0,) * 7


def test_noise_is_normal_with_the_set_standard_deviation_and_0_is_grpo() -> None:
    own = [(f"p{i}", float(i % 2)) for i in range(2000) for _ in (0, 1)]
    own = [(p, float(k % 2)) for k, (p, _) in enumerate(own)]
    noisy = plan(view(own, scale="none"), GRPONoise(noise=0.3)).advantages
    assert noisy is not None
    shifts = np.array(noisy[::2]) + 0.5
    assert abs(shifts.mean()) < 0.03  # 4.5 standard errors
    assert shifts.std() == pytest.approx(0.3, rel=0.07)
    quiet = plan(view(own), GRPONoise(noise=0.0)).advantages
    assert quiet == pytest.approx(view(own).advantages)


@pytest.mark.parametrize("wrong", [{"mix": 1.5}, {"mix": -0.1}, {"advantage_clip": 0}, {"scale": "x"}, {"pool": "x"}])
def test_out_of_range_settings_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        XGRPO(**wrong)


def test_variance_margin_matches_hand_computed_values() -> None:
    # Own rewards 1, 0 of lengths 2, 4; peer reward 1. Without rollout 1: local 0, pool 1/2; without 2: local 1, pool 1.
    # 2 ((1 - 0)^2 - (1 - 1/2)^2) / 2 + 4 ((0 - 1)^2 - (0 - 1)^2) / 2 = 3/4, over 6 tokens.
    assert variance_margin({"p": [1.0, 0.0]}, {"p": [1.0]}, {"p": [2, 4]}) == pytest.approx(0.125)
    # Own rewards 1, 1 and peer rewards 0, 0, 0: the pool mean is far off, and the margin is negative.
    assert variance_margin({"p": [1.0, 1.0]}, {"p": [0.0] * 3}, {"p": [1, 1]}) == pytest.approx(-(0.75**2) / 2)
    assert variance_margin({"p": [1.0]}, {"p": [0.0]}, {"p": [1]}) is None
    assert variance_margin({"p": [1.0, 0.0]}, {}, {"p": [1, 1]}) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.lists(st.floats(0, 1), min_size=1, max_size=5), st.data())
def test_variance_margin_is_the_theorems_difference(own: list[float], peer: list[float], data: Any) -> None:
    """(E[H D Delta] - E[H Delta^2] / 2) / E[H], with leave-one-out baselines."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(own), max_size=len(own)))
    hdd = hd2 = 0.0
    for i, (reward, size) in enumerate(zip(own, sizes, strict=True)):
        rest = own[:i] + own[i + 1 :]
        local, pool = sum(rest) / len(rest), (sum(rest) + sum(peer)) / (len(rest) + len(peer))
        hdd += size * (local - reward) * (local - pool)
        hd2 += size * (local - pool) ** 2
    expected = (hdd - hd2 / 2) / sum(sizes)
    assert variance_margin({"p": own}, {"p": peer}, {"p": sizes}) == pytest.approx(expected, abs=1e-9)
