from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.regimes.advantages import pool_advantages, standard_deviation


def group_advantages(rewards: list[list[float]], scale: str = "group") -> np.ndarray:  # type: ignore[type-arg]
    batch_std = standard_deviation([reward for row in rewards for reward in row])
    return np.stack([pool_advantages(row, row, scale=scale, batch_standard_deviation=batch_std) for row in rewards])


def test_advantages_match_hand_computed_values() -> None:
    # rewards 1, 0, 0, 0: mean 1/4, sample standard deviation sqrt(3 * (1/4)^2 + (3/4)^2) / sqrt(3) = 1/2
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert group_advantages([[1, 0, 0, 0]])[0] == pytest.approx(expected)
    assert group_advantages([[1, 1, 1]]).tolist() == [[0, 0, 0]]
    assert group_advantages([[1, 0]], scale="none").tolist() == [[0.5, -0.5]]
    # over the batch: rewards 1, 0, 1, 1 have mean 3/4 and sample standard deviation 1/2
    assert group_advantages([[1, 0], [1, 1]], scale="batch")[0, 0] == pytest.approx(0.5 / (0.5 + 1e-4))


@given(st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=6))
def test_group_advantages_sum_to_zero(rewards: list[list[float]]) -> None:
    advantages = group_advantages(rewards)
    assert np.abs(advantages.sum(axis=1)).max() < 1e-6 * max(1.0, np.abs(advantages).max())
    assert all(math.isfinite(a) for a in advantages.ravel())


def test_unknown_scale_is_rejected() -> None:
    with pytest.raises(ValueError, match="scale"):
        group_advantages([[1, 0]], scale="other")
