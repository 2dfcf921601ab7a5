"""Statistics compared with published examples and scipy's tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from scipy import stats

from mutualrl.study.statistics import Estimate, holm, paired, rank_correlation, smallest_found

#: Student's sleep data, hours gained under two drugs (R: datasets::sleep)
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_sleep_data_give_the_estimates_of_r() -> None:
    estimate = paired(DRUG_2, DRUG_1)
    # R: t.test(extra ~ group, paired = TRUE): t = 4.0621, df = 9, p = 0.002833, 95 % [0.7001142, 2.4598858]
    assert (estimate.mean, estimate.n) == (pytest.approx(1.58), 10)
    assert estimate.low == pytest.approx(0.7001142, abs=1e-7)
    assert estimate.high == pytest.approx(2.4598858, abs=1e-7)
    assert 2 * estimate.p_above() == pytest.approx(0.002833, abs=5e-7)
    # R: effectsize::cohens_d(..., paired = TRUE): 1.28, 95 % [0.41, 2.12]
    assert estimate.effect is not None
    correction = math.gamma(4.5) / (math.gamma(4) * math.sqrt(4.5))
    g, low, high = (value / correction for value in estimate.effect)
    assert (round(g, 2), round(low, 2), round(high, 2)) == (1.28, 0.41, 2.12)


def test_effect_size_flips_sign_with_the_values_and_is_inside_its_interval_or_none() -> None:
    one, other = paired(DRUG_2, DRUG_1).effect, paired(DRUG_1, DRUG_2).effect
    assert one is not None
    assert other is not None
    assert other == pytest.approx((-one[0], -one[2], -one[1]))
    for spread in (1e-1, 1e-2, 1e-3, 1e-6, 1e-12):
        effect = Estimate.of([0.8, 0.8 + spread, 0.8 - spread]).effect
        assert effect is None or (effect[1] < effect[0] < effect[2])


@pytest.mark.parametrize("bound", [-0.5, 0.0, 1.0, 2.5])
def test_one_sided_tests_match_scipy(bound: float) -> None:
    estimate = paired(DRUG_2, DRUG_1)
    shifted = [value + bound for value in DRUG_1]
    above = stats.ttest_rel(DRUG_2, shifted, alternative="greater").pvalue
    below = stats.ttest_rel(DRUG_2, shifted, alternative="less").pvalue
    assert estimate.p_above(bound) == pytest.approx(above)
    assert estimate.p_below(bound) == pytest.approx(below)


def within(estimate: Estimate, margin: float) -> float:
    """Return the p-value of two one-sided tests against a mean that is `margin` or more from 0."""
    return max(estimate.p_above(-margin), estimate.p_below(margin))


def test_equivalence_is_two_one_sided_tests() -> None:
    estimate = Estimate.of([0.01, -0.02, 0.015, 0.0, -0.01])
    sides = [
        stats.ttest_1samp([0.01, -0.02, 0.015, 0.0, -0.01], margin, alternative=way).pvalue
        for margin, way in ((-0.03, "greater"), (0.03, "less"))
    ]
    assert within(estimate, 0.03) == pytest.approx(max(sides))
    assert within(estimate, 0.03) <= 0.025 < within(estimate, 0.015)
    assert (estimate.low > -0.03) == (estimate.p_above(-0.03) <= 0.025)


@pytest.mark.parametrize("bound", [-0.2, -0.05, 0.0, 0.05, 0.2])
@pytest.mark.parametrize("resolution", [0.0, 0.04, 0.3])
def test_tests_and_intervals_agree(bound: float, resolution: float) -> None:
    estimate = Estimate.of([0.05, 0.09, 0.02, 0.07], resolution=resolution)
    assert (estimate.p_above(bound) <= 0.025) == (estimate.low >= bound)
    assert (estimate.p_below(bound) <= 0.025) == (estimate.high <= bound)


def test_equal_values_of_a_coarse_measure_are_not_certain() -> None:
    exact, coarse = Estimate.of([0.0] * 4), Estimate.of([0.0] * 4, resolution=1 / 64)
    assert (exact.low, exact.high) == (0.0, 0.0)
    assert (coarse.low, coarse.high) == (pytest.approx(-1 / 64), pytest.approx(1 / 64))
    assert within(exact, 0.01) == 0.0
    assert within(coarse, 0.01) > 0.025
    assert exact.effect is None
    assert Estimate.of([0.1] * 4).p_above() == 0.0
    assert Estimate.of([0.0] * 4).p_above() == 1.0


def test_one_or_two_values_decide_nothing() -> None:
    single, pair = Estimate.of([0.5]), Estimate.of([0.5, 0.500001])
    assert (single.low, single.high) == (-math.inf, math.inf)
    assert {single.p_above(), single.p_below(), pair.p_above(), pair.p_below(-9)} == {1.0}
    assert single.to_json() == {
        "n": 1,
        "mean": 0.5,
        "low": None,
        "high": None,
        "standard_deviation": None,
        "effect": None,
    }


def test_holm_matches_p_adjust_of_r() -> None:
    # R: p.adjust(c(0.01, 0.02, 0.03, 0.04), "holm") = 0.04 0.06 0.06 0.06
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.04, 0.001, 0.9]) == pytest.approx([0.08, 0.003, 0.9])
    assert holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_rank_correlation_is_spearmans_and_its_interval_is_over_clusters() -> None:
    x, y = DRUG_1, DRUG_2
    apart = [str(at) for at in range(10)]
    rho, low, high = rank_correlation(x, y, apart) or (0.0, 0.0, 0.0)
    ranks = [scipy.stats.rankdata(each) for each in (x, y)]
    assert rho == pytest.approx(np.corrcoef(*ranks)[0, 1])  # Spearman's rho is Pearson's r of the ranks
    assert low < rho < high <= 1
    assert rank_correlation(x, y, apart) == (rho, low, high), "the same draws every time"
    grouped = rank_correlation(x, y, [str(at // 3) for at in range(10)])
    assert grouped is not None
    assert grouped[0] == pytest.approx(rho)
    assert grouped[1:] != (low, high)
    # within each cluster no correlation, between the two kinds of clusters a perfect one
    assert rank_correlation([1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3], list("aabbcc")) == pytest.approx((1, 1, 1))
    assert rank_correlation([1, 2, 3], [1, 2, 3], list("abc")) is None
    assert rank_correlation([1, 1, 1, 1], [1, 2, 3, 4], list("abcd")) is None
    assert rank_correlation([1, 2, 3, 4], [1, 2, 3, 4], list("aabb")) is None, "two clusters"


def test_an_interval_of_fractions_stays_between_0_and_1_and_a_mean_reward_need_not() -> None:
    low = Estimate.of([0.0, 1 / 6, 0.0], resolution=1 / 6, bounds=(0.0, 1.0))
    assert low.low == 0.0 < low.mean < low.high < 1.0
    free = Estimate.of([0.0, 1 / 6, 0.0], resolution=1 / 6)
    assert free.low < 0.0
    assert (free.mean, free.high, free.p_above()) == (low.mean, low.high, low.p_above())
    for values, reading in (
        ([0.1, 0.2, 0.15], "above"),
        ([-0.1, -0.2, -0.15], "below"),
        ([0.1, -0.1, 0.2], "not decided"),
    ):
        assert Estimate.of(values).reading == reading
    assert Estimate.of([0.1, 0.1]).reading == "not decided"


@pytest.mark.parametrize(("n", "deviations"), [(3, 3.264), (5, 1.68), (10, 0.9957)])
def test_smallest_difference_found_has_the_power_by_simulation(n: int, deviations: float) -> None:
    """In standard deviations, for a two-sided test at .05 with a power of .8."""
    found = smallest_found(2.0, n)
    assert found == pytest.approx(2.0 * deviations, rel=0.01)
    rng = np.random.default_rng(0)
    values = rng.normal(found, 2.0, (40_000, n))
    half = stats.t.ppf(0.975, n - 1) * values.std(axis=1, ddof=1) / math.sqrt(n)
    assert (values.mean(axis=1) > half).mean() == pytest.approx(0.8, abs=0.01)
    assert math.isnan(smallest_found(math.nan, n))
