"""Guided rollouts: where the gate opened before, some own rollouts begin with a prefix of a peer's success.

Source: POPE (arXiv 2601.18779), BREAD (arXiv 2506.17211), Prefix-RFT (arXiv 2507.01679), with prefixes from peers. If
all of the learner's rollouts on a prompt fail and a peer succeeds, that success is remembered for `memory` rounds, or
until the learner succeeds on the prompt without a prefix. When the prompt recurs, a fraction `share` of its rollouts
start from a prefix of the success, of random length up to the fraction `max_prefix` of it. The prefix is masked from
the loss; the continuation is the learner's own on-policy sample, in one group with the other rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from mutualrl.records import PublishSchema
from mutualrl.regimes.round import GuideView, Plan, RoundView
from mutualrl.regimes.sgt import Candidate, Fitted, SGTSettings, draw_candidate, gated_prompts, supply
from mutualrl.regimes.spec import SUCCESS_ABOVE, Metric, Problem, RegimeSettings, RegimeSpec, always_late
from mutualrl.seeds import seeded


class GuidedSettings(RegimeSettings):
    """Settings of guided rollouts."""

    share: float = Field(0.5, ge=0, lt=1, description="fraction of a prompt's rollouts that begin with a prefix")
    max_prefix: float = Field(0.5, gt=0, lt=1, description="longest prefix, as a fraction of the peer's success")
    memory: int = Field(1000, ge=1, description="rounds for which a success is remembered")
    success_above: float = Field(SUCCESS_ABOVE, description="a rollout with a reward above this is a success")
    failure_below: float = Field(0.2, description="a rollout with a reward below this is a failure")

    @model_validator(mode="after")
    def _ordered(self) -> GuidedSettings:
        if self.failure_below > self.success_above:
            raise ValueError(
                f"failure_below ({self.failure_below}) must not exceed success_above ({self.success_above})"
            )
        return self

    def gate(self) -> SGTSettings:
        """Return SGT's gate with these thresholds."""
        return SGTSettings(success_above=self.success_above, failure_below=self.failure_below)


def guided_count(group: int, share: float) -> int:
    """Return how many of a group's rollouts begin with a prefix: the fraction `share`, rounded down, and never all."""
    return min(math.floor(share * group + 1e-9), group - 1)


def prefix_length(tokens: int, max_prefix: float, draw: float) -> int:
    """Return the length of a prefix of a success of `tokens` tokens: uniform over 1 to max_prefix * tokens, from a draw
    in [0, 1); 0 if that range is empty."""
    longest = math.floor(max_prefix * tokens)
    return 1 + math.floor(draw * longest) if longest >= 1 else 0


def prefixes(view: GuideView, settings: Any) -> list[tuple[int, ...]]:
    """Return the prefix of each upcoming rollout: the last rollouts of a group have one if a success is remembered.

    A prefix that fills the completion limit is dropped.
    """
    assert isinstance(settings, GuidedSettings)
    hints = view.state.get("hints", {})
    first_guided = view.group - guided_count(view.group, settings.share)
    result: list[tuple[int, ...]] = []
    for prompt_id, index in zip(view.prompt_ids, view.indices, strict=True):
        hint = hints.get(prompt_id)
        if hint is None or index < first_guided or hint[0] < view.round - settings.memory:
            result.append(())
            continue
        ids = hint[1]
        draw = float(seeded(view.run_seed, view.round, f"{prompt_id}\x1f{index}", view.learner).random())
        length = prefix_length(len(ids), settings.max_prefix, draw)
        result.append(tuple(ids[:length]) if length < view.max_length else ())
    return result


def plan(view: RoundView, settings: RegimeSettings) -> Plan:
    """Return the successes to remember, and the rewards of guided and unguided rollouts separately. Advantages are
    TRL's, over the whole group."""
    assert isinstance(settings, GuidedSettings)
    unguided_rewards: dict[str, list[float]] = {}
    for rollout in view.rollouts:
        if not rollout.prefix:
            unguided_rewards.setdefault(rollout.prompt_id, []).append(rollout.reward)
    gate = settings.gate()
    supplied = supply(view, gate)

    def candidates(prompt_id: str) -> list[Candidate]:
        return supplied.candidates(prompt_id, settings.success_above)

    def fit(candidate: Candidate) -> tuple[int, ...] | None:
        return view.transfer.to_learner_ids(candidate.text, candidate.ended)

    gated = gated_prompts(unguided_rewards, supplied.rewards, candidates, fit, gate, uses={})
    before = view.state.get("hints", {})
    solved = {r.prompt_id for r in view.rollouts if not r.prefix and r.reward > settings.success_above}
    hints = {
        prompt_id: hint
        for prompt_id, hint in before.items()
        if hint[0] >= view.round + 1 - settings.memory and prompt_id not in solved
    }
    for prompt_id, fitted in gated.fitted:
        drawn: Fitted = draw_candidate(
            fitted,
            gate,
            run_seed=view.run_seed,
            round_index=view.round,
            prompt_id=prompt_id,
            learner=view.learner,
        )
        hints[prompt_id] = [view.round, list(drawn.ids)]
    guided = [rollout for rollout in view.rollouts if rollout.prefix]
    unguided = [rollout for rollout in view.rollouts if not rollout.prefix]
    metrics = {
        "guided/gate_rate": gated.gated / max(gated.prompts, 1),
        "guided/rollouts": float(len(guided)),
        "guided/prefix_tokens": float(sum(rollout.prefix for rollout in guided)),
        "guided/hints": float(len(hints)),
        "guided/unfit": float(gated.unencodable),
        **_rewards("unguided", [rollout.reward for rollout in unguided], settings),
        **_rewards("guided", [rollout.reward for rollout in guided], settings),
    }
    return Plan(metrics=metrics, state={"hints": hints} if hints != before else None)


def _rewards(group: str, rewards: list[float], settings: GuidedSettings) -> dict[str, float]:
    """Return the mean reward and the success rate of the scored rollouts; empty without any."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if not scored:
        return {}
    return {
        f"guided/{group}_reward": sum(scored) / len(scored),
        f"guided/{group}_accuracy": sum(reward > settings.success_above for reward in scored) / len(scored),
    }


def check(settings: GuidedSettings, trainer: Mapping[str, Any]) -> list[Problem]:
    """Return (key, problem) for a share too small to prefix one rollout of a group."""
    group = int(trainer.get("num_generations", 8))
    if settings.share > 0 and guided_count(group, settings.share) == 0:
        problem = f"found {group}: regime.share {settings.share:g} of it is below one rollout; expected a larger share"
        return [("num_generations", problem)]
    return []


def publishes(settings: GuidedSettings) -> PublishSchema:
    """Return the fields that peers read: the texts of successes."""
    return PublishSchema.of("text", text_above=settings.success_above)


SPEC = RegimeSpec(
    name="guided",
    summary="where the gate opened before, some own rollouts begin with a prefix of a peer's success",
    settings=GuidedSettings,
    publishes=publishes,
    plan=plan,
    prefixes=prefixes,
    late=always_late,
    check=check,
    metrics=(
        Metric("guided/gate_rate", "fraction", "prompts whose gate opened", role="gate_rate"),
        Metric("guided/rollouts", "rollouts", "own rollouts that began with a prefix"),
        Metric("guided/prefix_tokens", "tokens", "tokens of the prefixes"),
        Metric("guided/hints", "prompts", "prompts with a remembered success"),
        Metric("guided/unfit", "rows", "successes that the learner cannot encode"),
        Metric("guided/unguided_reward", "reward", "mean over own rollouts without a prefix", "reward, unguided"),
        Metric("guided/unguided_accuracy", "fraction", "successes among own rollouts without a prefix"),
        Metric("guided/guided_reward", "reward", "mean over own rollouts with a prefix"),
        Metric("guided/guided_accuracy", "fraction", "successes among own rollouts with a prefix"),
    ),
)
