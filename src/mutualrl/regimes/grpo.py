"""GRPO: each policy learns only from its own rollouts. The baseline, and the base of every other regime."""

from __future__ import annotations

from mutualrl.regimes.spec import RegimeSettings, RegimeSpec


class GRPOSettings(RegimeSettings):
    """No settings: those of the algorithm are TRL's, under `trainer:`."""


SPEC = RegimeSpec(
    name="grpo",
    summary="own rollouts only: step for step the same as plain TRL",
    settings=GRPOSettings,
    reads_peers=False,
    plan=None,
)
