"""GRPO with a noisy baseline: the paper's control for XGRPO.

Source: paper, Section "Ablation: shared normalization for XGRPO" ("GRPO + random perturbation": noise in the
per-prompt baseline, the `id2mean` values, before normalization). The paper does not give the scale of the noise. It
perturbs every group, including those of equal rewards: if advantages are scaled by the group, whose standard deviation
is then 0, its advantages are noise * z / 1e-4, and only gradient clipping bounds the step. `equal_groups: exempt` is a
milder form: such a group keeps advantage 0, as in GRPO.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mutualrl.regimes.advantages import group_by_prompt, pool_advantages, standard_deviation, ungroup
from mutualrl.regimes.round import Plan, RoundView
from mutualrl.regimes.spec import RegimeSettings, RegimeSpec, advantage_metric_table, advantage_metrics
from mutualrl.seeds import seeded


class NoiseSettings(RegimeSettings):
    """Settings of the control."""

    noise: float = Field(
        0.1, ge=0, description="standard deviation of the normal draw added to each prompt's mean reward"
    )
    equal_groups: Literal["perturbed", "exempt"] = Field(
        "perturbed", description="groups of equal rewards: perturbed like the others, or left at advantage 0"
    )


def plan(view: RoundView, settings: RegimeSettings) -> Plan:
    """Return own advantages with each prompt's mean shifted by a normal draw.

    A = (r - (mean + noise * z)) / (std + 1e-4), z ~ N(0, 1), one per prompt and round.
    """
    assert isinstance(settings, NoiseSettings)
    batch_std = standard_deviation(view.rewards)
    groups = {
        prompt_id: pool_advantages(
            rewards,
            rewards,
            scale=view.scale,
            batch_standard_deviation=batch_std,
            exempt_equal=settings.equal_groups == "exempt" or settings.noise == 0,
            shift=settings.noise * float(seeded(view.run_seed, view.round, prompt_id, view.learner).normal()),
        )
        for prompt_id, rewards in group_by_prompt(view.prompt_ids, view.rewards).items()
    }
    advantages = ungroup(view.prompt_ids, groups)
    return Plan(advantages=advantages, metrics=advantage_metrics("noise", view.advantages, advantages))


SPEC = RegimeSpec(
    name="grpo-noise",
    summary="control: GRPO whose per-prompt mean reward is perturbed by noise",
    settings=NoiseSettings,
    reads_peers=False,
    plan=plan,
    moves_advantages=True,
    metrics=advantage_metric_table("noise"),
    level="value",
    control=True,
)
