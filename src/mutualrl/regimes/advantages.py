"""Group-relative advantages: within a group, over a pool, with a noisy baseline. Pure functions of rewards.

Mean and standard deviation are those of TRL: the sample standard deviation (n - 1), plus 1e-4. An unscorable rollout
(NaN reward) is excluded from both and has advantage 0. Source: paper, Section "Preliminaries" and Sections "Regime 1"
and "Regime 2".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]

EPSILON = 1e-4  # TRL's
SCALES = ("group", "batch", "none")


def pool_advantages(
    rewards_G: npt.ArrayLike,
    pool: npt.ArrayLike,
    *,
    scale: str,
    batch_standard_deviation: float = np.nan,
    baseline: Baseline = "mean",
    shift: float = 0.0,
    exempt_equal: bool = True,
) -> Floats:
    """Return A_i = (r_i - b - shift) / (s + 1e-4) for the rewards of one prompt, shape (G,).

    `pool`: the rewards, `rewards_G` included, for the baseline b (their mean) and, with `scale="group"`, for s (their
    standard deviation). `batch_standard_deviation` is s with `scale="batch"`; `"none"` does not divide. With
    `baseline="leave_one_out"` b is the mean of the pool without r_i, hence independent of rollout i (paper, Assumption
    "Baseline comparison"). With `exempt_equal` a pool of equal rewards gives 0 everywhere, whatever the shift. Raises
    ValueError for an unknown scale."""
    if scale not in SCALES:
        raise ValueError(f"scale: found {scale!r}, expected one of: {', '.join(SCALES)}")
    rewards, pooled = np.asarray(rewards_G, dtype=np.float64), np.asarray(pool, dtype=np.float64)
    scored = pooled[~np.isnan(pooled)]
    if not scored.size or (exempt_equal and scored.min() == scored.max()):
        return np.zeros_like(rewards)
    centre: float | Floats = float(scored.mean())
    if baseline == "leave_one_out":
        centre = (scored.sum() - rewards) / (scored.size - 1)
    advantages: Floats = rewards - centre - shift
    if scale != "none":
        std = standard_deviation(scored) if scale == "group" else batch_standard_deviation
        advantages = advantages / (std + EPSILON)
    return np.nan_to_num(advantages, nan=0.0)


def whiten(advantages: npt.ArrayLike, scored: npt.ArrayLike, pool: npt.ArrayLike | None = None) -> Floats:
    """Return (A_i - mean) / (s + 1e-4) with mean and standard deviation s (n - 1) over a batch, shape (N,).

    `scored`: which rollouts have a reward; the others stay out and get 0. `pool`: the scored advantages whose constants
    are used, by default these. A batch without spread gives 0 everywhere. Source: paper, Section "Preliminaries"
    ("normalize them to zero mean and unit variance across the batch"); mean, deviation and 1e-4 as in TRL's
    `normalize_then_sum`."""
    values, counted = np.asarray(advantages, dtype=np.float64), np.asarray(scored, dtype=bool)
    batch = values[counted] if pool is None else np.asarray(pool, dtype=np.float64)
    if batch.size < 2 or batch.min() == batch.max():
        return np.zeros_like(values)
    whitened: Floats = np.where(counted, (values - batch.mean()) / (batch.std(ddof=1) + EPSILON), 0.0)
    return whitened


def standard_deviation(rewards: npt.ArrayLike) -> float:
    """Return the sample standard deviation (n - 1) of the non-NaN rewards; 0 for fewer than two."""
    values = np.asarray(rewards, dtype=np.float64)
    values = values[~np.isnan(values)]
    return float(values.std(ddof=1)) if values.size > 1 else 0.0


def success_rate(rewards: npt.ArrayLike) -> float | None:
    """Return the fraction of the non-NaN rewards that are above 0; None without any."""
    values = np.asarray(rewards, dtype=np.float64)
    values = values[~np.isnan(values)]
    return float((values > 0).mean()) if values.size else None


def group_by_prompt(prompt_ids: Sequence[str], values: Sequence[float]) -> dict[str, list[float]]:
    """Return values grouped by prompt, in their order."""
    groups: dict[str, list[float]] = {}
    for prompt_id, value in zip(prompt_ids, values, strict=True):
        groups.setdefault(prompt_id, []).append(value)
    return groups


def ungroup(prompt_ids: Sequence[str], groups: Mapping[str, npt.ArrayLike]) -> tuple[float, ...]:
    """Invert `group_by_prompt`: return the groups' values in row order."""
    values = {prompt_id: np.asarray(group, dtype=np.float64).tolist() for prompt_id, group in groups.items()}
    used = dict.fromkeys(groups, 0)
    rows = []
    for prompt_id in prompt_ids:
        rows.append(values[prompt_id][used[prompt_id]])
        used[prompt_id] += 1
    return tuple(rows)
