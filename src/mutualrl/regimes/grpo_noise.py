"""GRPO with a noisy baseline: the paper's control for XGRPO.

Source: paper, Section "Ablation: shared normalization for XGRPO" ("GRPO + random perturbation": noise in the
per-prompt baseline, the `id2mean` values, before normalization). The paper does not give the scale of the noise. It
perturbs every group, including those of equal rewards: if advantages are scaled by the group, whose standard deviation
is then 0, its advantages are noise * z / 1e-4, and only gradient clipping bounds the step. `equal_groups: exempt` is a
milder form: such a group keeps advantage 0, as in GRPO.
"""

from __future__ import annotations

from typing import Literal

from mutualrl.regimes.advantages import group_by_prompt, pool_advantages, standard_deviation, ungroup
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.regime import Regime, advantage_metric_table, advantage_metrics, setting
from mutualrl.regimes.round import Plan, RoundView
from mutualrl.seeds import seeded


class GRPONoise(Regime):
    """The control."""

    name = "grpo-noise"
    summary = "control: GRPO whose per-prompt mean reward is perturbed by noise"
    metrics = advantage_metric_table("noise")
    level = "value"
    control = True

    noise: float = setting(0.1, "standard deviation of the normal draw added to each prompt's mean reward", ge=0)
    equal_groups: Literal["perturbed", "exempt"] = setting(
        "perturbed", "groups of equal rewards: perturbed like the others, or left at advantage 0"
    )

    def needs(self) -> Needs:
        """Return that it sets advantages, and reads no peers."""
        return Needs(advantages="sets", peers=False)

    def plan(self, view: RoundView) -> Plan:
        """Return own advantages with each prompt's mean shifted by a normal draw.

        A = (r - (mean + noise * z)) / (std + 1e-4), z ~ N(0, 1), one per prompt and round.
        """
        batch_std = standard_deviation(view.rewards)
        groups = {}
        for prompt_id, rewards in group_by_prompt(view.prompt_ids, view.rewards).items():
            z = float(seeded(view.run_seed, view.round, prompt_id, view.learner).normal())
            groups[prompt_id] = pool_advantages(
                rewards,
                rewards,
                scale=view.scale,
                batch_standard_deviation=batch_std,
                exempt_equal=self.equal_groups == "exempt" or self.noise == 0,
                shift=self.noise * z,
            )
        advantages = ungroup(view.prompt_ids, groups)
        return Plan(advantages=advantages, metrics=advantage_metrics("noise", view.advantages, advantages))
