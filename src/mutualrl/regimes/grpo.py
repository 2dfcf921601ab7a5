"""GRPO: each policy learns from its own rollouts alone. The baseline, and the base of every other regime."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mutualrl.regimes.base import RegimeSettings, RegimeSpec, RoundPlan

EPSILON = 1e-4  # TRL's


class GRPOSettings(RegimeSettings):
    """GRPO has no settings of its own: the algorithm's are TRL's, under `trainer:`."""


def group_advantages(rewards_P_G: npt.ArrayLike, *, scale: str = "group") -> npt.NDArray[np.float64]:
    """Group-relative advantages A = (r - mean) / (std + 1e-4), of shape (prompts, rollouts).

    The mean is a group's, the deviation the sample deviation (n - 1) of the group (`scale="group"`), of
    all rewards (`"batch"`), or left out (`"none"`): TRL's rule. Source: paper, Section "Preliminaries".
    Raises ValueError for another shape or scale.
    """
    rewards = np.asarray(rewards_P_G, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards: found shape {rewards.shape}, expected (prompts, at least 2 rollouts)")
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if scale == "none":
        return centred
    if scale == "group":
        return centred / (rewards.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    if scale == "batch":
        return centred / (rewards.std(ddof=1) + EPSILON)
    raise ValueError(f"scale: found {scale!r}, expected 'group', 'batch' or 'none'")


SPEC = RegimeSpec(
    name="grpo",
    summary="own rollouts only: step for step what plain TRL computes",
    settings=GRPOSettings,
    publishes=lambda settings: frozenset(),
    text_above=lambda settings: float("inf"),
    reads_peers=False,
    plan=lambda view, settings: RoundPlan(),
)
