"""Inference over seeds: paired differences, effect sizes, equivalence, and a correction for many claims.

Every test is one-sided at level `alpha`: with .025, a claim is held exactly where the 95 % interval lies on its side.
Differences are paired by seed and taken as normal; scipy's Student t does the rest. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

ALPHA = 0.025  # of each one-sided test: two-sided 95 % intervals
FEWEST = 3  # values: fewer decide nothing


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of `n` values, one per seed, with its interval and tests.

    `standard_deviation` is over the values (n - 1); NaN of one value. `resolution`: the smallest step that the measure
    can make (1 / problems for an accuracy). No interval is narrower than it to each side: equal values of a coarse
    measure are no certainty.
    """

    n: int
    mean: float
    standard_deviation: float
    resolution: float = 0.0
    alpha: float = ALPHA

    @classmethod
    def of(cls, values: Sequence[float], *, resolution: float = 0.0, alpha: float = ALPHA) -> Estimate:
        """Return the estimate from values, at least one."""
        array = np.asarray(values, dtype=np.float64)
        deviation = float(array.std(ddof=1)) if len(array) > 1 else math.nan
        return cls(len(array), float(array.mean()), deviation, resolution, alpha)

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean, sd / sqrt(n), or the one that the resolution stands for if larger."""
        if self.n < 2:
            return math.nan
        return max(self.standard_deviation / math.sqrt(self.n), self.resolution / self._critical)

    @property
    def low(self) -> float:
        """Return the lower end of the two-sided (1 - 2 alpha) interval; -inf of one value."""
        return -math.inf if self.n < 2 else self.mean - self._critical * self.standard_error

    @property
    def high(self) -> float:
        """Return the upper end of the two-sided (1 - 2 alpha) interval; inf of one value."""
        return math.inf if self.n < 2 else self.mean + self._critical * self.standard_error

    def p_above(self, bound: float = 0.0) -> float:
        """Return the p-value against "the mean is at most `bound`"; 1 of fewer than three values."""
        if self.n < FEWEST:
            return 1.0
        if self.standard_error == 0.0:
            return 0.0 if self.mean > bound else 1.0
        return float(stats.t.sf((self.mean - bound) / self.standard_error, self.n - 1))

    def p_below(self, bound: float = 0.0) -> float:
        """Return the p-value against "the mean is at least `bound`"; 1 of fewer than three values."""
        if self.n < FEWEST:
            return 1.0
        if self.standard_error == 0.0:
            return 0.0 if self.mean < bound else 1.0
        return float(stats.t.cdf((self.mean - bound) / self.standard_error, self.n - 1))

    def p_within(self, margin: float) -> float:
        """Return the p-value of two one-sided tests against "the mean is `margin` or more from 0" (Schuirmann)."""
        return max(self.p_above(-margin), self.p_below(margin))

    def p_outside(self, margin: float) -> float:
        """Return the p-value against "the mean is within `margin` of 0": the smaller of the two sides' tests, each of
        which is at level alpha."""
        return min(self.p_above(margin), self.p_below(-margin))

    @property
    def effect(self) -> tuple[float, float, float] | None:
        """Return Hedges' g of paired differences, (g, low, high): mean / sd, times the correction for small samples
        (gamma form); its interval inverts the noncentral t. None of fewer than three values, and where they are so
        nearly equal that scipy has no interval."""
        if self.n < FEWEST or not self.standard_deviation > 0.0:
            return None
        freedom = self.n - 1
        correction = math.exp(special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)) / math.sqrt(
            freedom / 2
        )
        t = self.mean / self.standard_deviation * math.sqrt(self.n)
        ends = _noncentralities(abs(t), freedom, self.alpha)
        if ends is None:
            return None
        low, high = ends if t >= 0 else (-ends[1], -ends[0])
        scale = correction / math.sqrt(self.n)
        return t * scale, low * scale, high * scale

    @property
    def _critical(self) -> float:
        return float(stats.t.isf(self.alpha, self.n - 1))

    def to_json(self, *, effect: bool = True) -> dict[str, float | int | list[float] | None]:
        """Return n, mean, interval and, of a difference, the effect size; what one value does not have is null."""
        ends = {"low": self.low, "high": self.high, "standard_deviation": self.standard_deviation}
        result: dict[str, float | int | list[float] | None] = {"n": self.n, "mean": self.mean}
        result |= {name: value if math.isfinite(value) else None for name, value in ends.items()}
        if effect:
            size = self.effect
            result["effect"] = None if size is None else list(size)
        return result

    def __str__(self) -> str:
        """Return the mean with its sign and interval."""
        if self.n < 2:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def _noncentralities(t: float, freedom: int, alpha: float) -> tuple[float, float] | None:
    """Return the noncentralities under which P(T <= t) is 1 - alpha, and alpha, for t >= 0; None where scipy's
    noncentral t is not finite so far out."""

    def excess(noncentrality: float, probability: float) -> float:
        return float(stats.nct.cdf(t, freedom, noncentrality)) - probability

    ends = []
    for probability in (1 - alpha, alpha):
        below, above = -4.0, t + 4.0  # P(T <= t) falls as the noncentrality rises, from nearly 1
        while excess(above, probability) > 0:
            above *= 2
        try:
            ends.append(float(optimize.brentq(excess, below, above, args=(probability,))))
        except ValueError:  # what brentq raises where the function is NaN
            return None
    return ends[0], ends[1]


def paired(one: Sequence[float], other: Sequence[float], *, resolution: float = 0.0, alpha: float = ALPHA) -> Estimate:
    """Return the estimate of one - other, value by value."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return Estimate.of(differences, resolution=resolution, alpha=alpha)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method: to reject where an adjusted one is at most alpha keeps the
    chance of any false rejection among these hypotheses at alpha (Holm 1979)."""
    count, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def correlation(x: Sequence[float], y: Sequence[float], *, alpha: float = ALPHA) -> tuple[float, float, float] | None:
    """Return Pearson's r with its interval by Fisher's z, (r, low, high); None of fewer than four points, or where one
    of them does not vary."""
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    result = stats.pearsonr(x, y)
    interval = result.confidence_interval(1 - 2 * alpha)
    return float(result.statistic), float(interval.low), float(interval.high)
