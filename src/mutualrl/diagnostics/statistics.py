"""Statistics shared by the diagnostics. Pure functions; a rate with denominator 0 is NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mutualrl.regimes.advantages import EPSILON

Floats = npt.NDArray[np.float64]

RESAMPLES = 1000
_NOISE = 1e-12  # relative rounding error
_CHUNK = 2_000_000  # random numbers per chunk


def ratio(part: npt.ArrayLike, total: npt.ArrayLike) -> Floats:
    """Return part / total, NaN where total is 0."""
    part, total = np.asarray(part, dtype=np.float64), np.asarray(total, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, part / total, np.nan)[()]


def jaccard(sets_M_P: npt.NDArray[np.bool_]) -> float:
    """Return |intersection| / |union| of the rows' sets; NaN when all are empty."""
    return float(ratio(sets_M_P.all(axis=0).sum(), sets_M_P.any(axis=0).sum()))


def pearson(x_P: Floats, y_P: Floats) -> float:
    """Return Pearson's correlation; NaN for fewer than two points, or if x or y varies by no more than rounding."""
    if len(x_P) < 2 or any(np.ptp(v) <= _NOISE * max(1.0, float(np.abs(v).max())) for v in (x_P, y_P)):
        return float("nan")
    return float(np.corrcoef(x_P, y_P)[0, 1])


def intervals(
    columns_P_Q: Floats, statistic: Callable[[Floats], Floats], seed: int, level: float = 0.95
) -> list[tuple[float, float]]:
    """Return percentile bootstrap intervals over units.

    `statistic` maps sums (B, Q) of the columns over B resamples of the P units to values (B, S); there is one interval
    per S. NaNs among the resamples are left out; an interval of NaNs only is (NaN, NaN)."""
    units = len(columns_P_Q)
    rng = np.random.default_rng(seed)
    sums = np.empty((RESAMPLES, columns_P_Q.shape[1]))
    step = max(1, _CHUNK // max(units, 1))
    for start in range(0, RESAMPLES, step):
        count = min(step, RESAMPLES - start)
        drawn = rng.integers(units, size=(count, units))
        drawn += np.arange(count)[:, None] * units
        weights = np.bincount(drawn.ravel(), minlength=count * units).reshape(count, units)
        sums[start : start + count] = weights @ columns_P_Q
    values = statistic(sums)
    tail = (1 - level) / 2
    undefined = np.isnan(values)
    complete = ~undefined.any(axis=0)
    ends = np.full((2, values.shape[1]), np.nan)
    ends[:, complete] = np.quantile(values[:, complete], [tail, 1 - tail], axis=0)
    for column in np.flatnonzero(~complete & ~undefined.all(axis=0)):
        defined = values[~undefined[:, column], column]
        ends[:, column] = np.quantile(defined, [tail, 1 - tail])
    return [(float(low), float(high)) for low, high in ends.T]


def mean_interval(values_P: Floats, seed: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean over units; NaN without any."""
    if not len(values_P):
        return float("nan"), float("nan")
    return intervals(values_P[:, None], lambda sums: sums / len(values_P), seed)[0]


def pooled_advantages(
    own_P_G: Floats, pool_P_H: Floats, *, scale: str, batch_standard_deviation: float | Floats = np.nan
) -> Floats:
    """Return `regimes.advantages.pool_advantages`, vectorized over prompts, shape (P, G); baseline: the pool's mean.

    NaN rewards are excluded from the mean and have advantage 0; so have all rewards of a pool of equal ones, and a
    reward that differs from the mean by no more than rounding. `batch_standard_deviation`: a number, or (P, 1)."""
    scored = ~np.isnan(pool_P_H)
    count = scored.sum(axis=1, keepdims=True)
    values = np.where(scored, pool_P_H, 0.0)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    highest = np.where(scored, pool_P_H, -np.inf).max(axis=1, keepdims=True)
    lowest = np.where(scored, pool_P_H, np.inf).min(axis=1, keepdims=True)
    advantages = own_P_G - mean
    largest = np.where(scored, np.abs(pool_P_H), 0.0).max(axis=1, keepdims=True)
    advantages = np.where(np.abs(advantages) <= _NOISE * largest, 0.0, advantages)
    if scale == "group":
        squares = np.where(scored, (pool_P_H - mean) ** 2, 0.0).sum(axis=1, keepdims=True)
        advantages = advantages / (np.sqrt(squares / np.maximum(count - 1, 1)) + EPSILON)
    elif scale == "batch":
        advantages = advantages / (batch_standard_deviation + EPSILON)
    result: Floats = np.where((count > 0) & (highest > lowest), np.nan_to_num(advantages, nan=0.0), 0.0)
    return result


def row_standard_deviations(values_P_H: Floats) -> Floats:
    """Return the standard deviation (n - 1) of each row's numbers; 0 for fewer than two."""
    scored = ~np.isnan(values_P_H)
    count = scored.sum(axis=1)
    mean = np.where(scored, values_P_H, 0.0).sum(axis=1) / np.maximum(count, 1)
    squares = np.where(scored, (values_P_H - mean[:, None]) ** 2, 0.0).sum(axis=1)
    result: Floats = np.sqrt(squares / np.maximum(count - 1, 1)) * (count > 1)
    return result


def all_fail(samples: npt.ArrayLike, successes: npt.ArrayLike, k: int) -> Floats:
    """Return the probability that k rollouts all fail, estimated from c successes in n samples.

    k <= n: C(n - c, k) / C(n, k), unbiased for (1 - p)^k. k > n: (1 - c / n)^k, biased (a prompt without a success
    among n counts as unsolvable).
    """
    n, c = np.broadcast_arrays(np.asarray(samples, dtype=np.float64), np.asarray(successes, dtype=np.float64))
    exact = np.ones(n.shape)
    for i in range(k):
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = exact * np.where(n > i, np.maximum(n - c - i, 0) / np.maximum(n - i, 1), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        plug_in = np.where(n > 0, 1 - c / np.maximum(n, 1), 1.0) ** k
    probability: Floats = np.where(k <= n, exact, plug_in)
    return probability
