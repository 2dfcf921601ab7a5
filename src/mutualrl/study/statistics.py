"""Inference over seeds: paired differences, effect sizes, equivalence, and correction for multiple testing.

Every test is one-sided at level `alpha`: with .025, a claim is held exactly if the 95 % interval is on its side.
Differences are paired by seed and assumed normal (Student's t, scipy). Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

ALPHA = 0.025  # per one-sided test: two-sided 95 % intervals
MIN_VALUES = 3  # values per test; with fewer, p = 1
Reading = Literal["above", "below", "not decided"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of `n` values, one per seed, with its interval and tests.

    `standard_deviation` is over the values (n - 1); NaN for one value. `resolution`: the smallest step of the measure
    (1 / problems for an accuracy), and the smallest half-width of an interval: equal values of a coarse measure do not
    mean certainty. `bounds`: of the measure, which no interval leaves. `of_guess`: the values are equal, and the
    resolution is a guess, so that a table shows no interval.
    """

    n: int
    mean: float
    standard_deviation: float
    resolution: float = 0.0
    alpha: float = ALPHA
    bounds: tuple[float, float] | None = None
    of_guess: bool = False

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        *,
        resolution: float = 0.0,
        alpha: float = ALPHA,
        bounds: tuple[float, float] | None = None,
    ) -> Estimate:
        """Estimate the mean from at least one value."""
        array = np.asarray(values, dtype=np.float64)
        standard_deviation = float(array.std(ddof=1)) if len(array) > 1 else math.nan
        return cls(len(array), float(array.mean()), standard_deviation, resolution, alpha, bounds)

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean, sd / sqrt(n), or the one implied by the resolution if larger."""
        if self.n < 2:
            return math.nan
        return max(self.standard_deviation / math.sqrt(self.n), self.resolution / self._critical)

    @property
    def low(self) -> float:
        """Return the lower end of the two-sided (1 - 2 alpha) interval; -inf for one value."""
        low = -math.inf if self.n < 2 else self.mean - self._critical * self.standard_error
        return low if self.bounds is None else max(low, self.bounds[0])

    @property
    def high(self) -> float:
        """Return the upper end of the two-sided (1 - 2 alpha) interval; inf for one value."""
        high = math.inf if self.n < 2 else self.mean + self._critical * self.standard_error
        return high if self.bounds is None else min(high, self.bounds[1])

    @property
    def reading(self) -> Reading:
        """Return what the interval of a difference says; not decided with fewer than three values."""
        if self.n < MIN_VALUES or self.low <= 0 <= self.high:
            return "not decided"
        return "above" if self.low > 0 else "below"

    def p_above(self, bound: float = 0.0) -> float:
        """Return the p-value against "the mean is at most `bound`"; 1 for fewer than three values."""
        if self.n < MIN_VALUES:
            return 1.0
        if self.standard_error == 0.0:
            return 0.0 if self.mean > bound else 1.0
        return float(scipy.stats.t.sf((self.mean - bound) / self.standard_error, self.n - 1))

    def p_below(self, bound: float = 0.0) -> float:
        """Return the p-value against "the mean is at least `bound`"; 1 for fewer than three values."""
        if self.n < MIN_VALUES:
            return 1.0
        if self.standard_error == 0.0:
            return 0.0 if self.mean < bound else 1.0
        return float(scipy.stats.t.cdf((self.mean - bound) / self.standard_error, self.n - 1))

    @property
    def effect(self) -> tuple[float, float, float] | None:
        """Return Hedges' g of paired differences, (g, low, high): mean / sd, times the small-sample correction (gamma
        form); its interval inverts the noncentral t. None for fewer than three values, and if they are so nearly equal
        that scipy has no interval."""
        if self.n < MIN_VALUES or not self.standard_deviation > 0.0:
            return None
        df = self.n - 1
        correction = math.exp(scipy.special.gammaln(df / 2) - scipy.special.gammaln((df - 1) / 2)) / math.sqrt(df / 2)
        t = self.mean / self.standard_deviation * math.sqrt(self.n)
        bounds = _noncentralities(abs(t), df, self.alpha)
        if bounds is None:
            return None
        low, high = bounds if t >= 0 else (-bounds[1], -bounds[0])
        scale = correction / math.sqrt(self.n)
        return t * scale, low * scale, high * scale

    @property
    def _critical(self) -> float:
        return float(scipy.stats.t.isf(self.alpha, self.n - 1))

    def to_json(self, *, effect: bool = True) -> dict[str, float | int | list[float] | None]:
        """Return n, mean, interval and, for a difference, the effect size; null if one value does not define it."""
        spread = {"low": self.low, "high": self.high, "standard_deviation": self.standard_deviation}
        result: dict[str, float | int | list[float] | None] = {"n": self.n, "mean": self.mean}
        result |= {name: value if math.isfinite(value) else None for name, value in spread.items()}
        if effect:
            size = self.effect
            result["effect"] = None if size is None else list(size)
        return result

    def __str__(self) -> str:
        """Return the mean with its sign and interval."""
        if self.n < 2:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def _noncentralities(t: float, df: int, alpha: float) -> tuple[float, float] | None:
    """Return the noncentralities at which P(T <= t) is 1 - alpha and alpha, for t >= 0; None if scipy's noncentral t
    is not finite there."""

    def excess(noncentrality: float, probability: float) -> float:
        return float(scipy.stats.nct.cdf(t, df, noncentrality)) - probability

    bounds = []
    for probability in (1 - alpha, alpha):
        below, above = -4.0, t + 4.0  # P(T <= t) falls as the noncentrality rises, from nearly 1
        while excess(above, probability) > 0:
            above *= 2
        try:
            bounds.append(float(scipy.optimize.brentq(excess, below, above, args=(probability,))))
        except ValueError:  # raised by brentq if the function is NaN
            return None
    return bounds[0], bounds[1]


def paired(one: Sequence[float], other: Sequence[float], *, resolution: float = 0.0, alpha: float = ALPHA) -> Estimate:
    """Return the estimate of one - other, value by value."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return Estimate.of(differences, resolution=resolution, alpha=alpha)


def smallest_found(standard_deviation: float, n: int, *, power: float = 0.8, alpha: float = ALPHA) -> float:
    """Return the smallest true mean of `n` values with this standard deviation whose 95 % interval is on its side with
    a probability of `power`: the power statement of a sweep. NaN if the deviation is unknown."""
    if not standard_deviation >= 0 or n < 2:
        return math.nan
    critical, df = float(scipy.stats.t.ppf(1 - alpha, n - 1)), n - 1

    def lacking(noncentrality: float) -> float:
        return float(scipy.stats.nct.cdf(critical, df, noncentrality)) - (1 - power)

    return float(scipy.optimize.brentq(lacking, 0.0, critical + 6.0)) * standard_deviation / math.sqrt(n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method (Holm 1979): rejecting where they are at most alpha bounds
    the family-wise error rate by alpha."""
    count, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def rank_correlation(
    x: Sequence[float], y: Sequence[float], clusters: Sequence[str], *, seed: int = 0, alpha: float = ALPHA
) -> tuple[float, float, float] | None:
    """Return Spearman's rho with a percentile interval over resampled clusters, (rho, low, high); None for fewer than
    four points or three clusters, or if x or y is constant. `clusters`: of each point; points of a cluster (policies of
    the same models) are not independent of each other, so clusters are drawn with replacement, not points."""
    names = sorted(set(clusters))
    if len(x) < 4 or len(names) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    points = {name: [at for at, cluster in enumerate(clusters) if cluster == name] for name in names}
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = [at for name in generator.choice(names, len(names)) for at in points[name]]
        one, other = np.asarray(x)[chosen], np.asarray(y)[chosen]
        if np.ptp(one) and np.ptp(other):
            drawn.append(float(scipy.stats.spearmanr(one, other).statistic))
    low, high = np.quantile(drawn, (alpha, 1 - alpha))
    return float(scipy.stats.spearmanr(x, y).statistic), float(low), float(high)


RESAMPLES = 2000
