"""GRPO: each policy learns only from its own rollouts. The baseline, and the base of every other regime."""

from __future__ import annotations

from mutualrl.regimes.regime import Regime
from mutualrl.traits import RegimeTraits


class GRPO(Regime):
    """GRPO, without settings: those of the algorithm are TRL's, under `trainer:`."""

    name = "grpo"
    summary = "own rollouts only: step for step the same as plain TRL"
    traits = RegimeTraits(shares=False, reads_peers=False)
