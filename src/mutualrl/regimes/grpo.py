"""GRPO: each policy learns only from its own rollouts. The baseline, and the base of every other regime."""

from __future__ import annotations

from mutualrl.regimes.needs import Needs
from mutualrl.regimes.regime import Regime


class GRPO(Regime):
    """GRPO, without settings: those of the algorithm are TRL's, under `trainer:`."""

    name = "grpo"
    summary = "own rollouts only: step for step the same as plain TRL"

    def needs(self) -> Needs:
        """Return that it shares nothing."""
        return Needs(shares=False, peers=False)
