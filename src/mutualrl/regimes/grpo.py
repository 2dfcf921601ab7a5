"""GRPO: each policy learns from its own rollouts alone. The baseline, and the base of every other regime."""

from __future__ import annotations

from mutualrl.regimes.spec import RegimeSettings, RegimeSpec


class GRPOSettings(RegimeSettings):
    """GRPO has no settings of its own: the algorithm's are TRL's, under `trainer:`."""


SPEC = RegimeSpec(
    name="grpo",
    summary="own rollouts only: step for step what plain TRL computes",
    settings=GRPOSettings,
    reads_peers=False,
    plan=None,
)
