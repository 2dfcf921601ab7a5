"""SAPO of RL Swarm: the update uses some own groups and some of the peers', with advantages within each group.

Source: arXiv 2509.08721 (Swarm sAmpling Policy Optimization; not TRL's `loss_type: sapo`). I of the learner's groups
are kept and J of the peers' are drawn; groups without variance are dropped from both. A peer's group is normalised
within itself and scored by the learner's own verifier: if the rewards differ, it is dropped and counted. A peer may
have seen other prompts, if they are in the learner's data. The loss is a mean over the kept own and the drawn rollouts.

Interpretations: a group is one policy's rollouts on one prompt; J groups are drawn uniformly from all usable ones.
`denominator: own` is the source's (ratio 1 at the start of a round); `peer` uses the peer's aligned trace.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from pydantic import model_validator

from mutualrl.records import PublishSchema, Rollout
from mutualrl.regimes.advantages import group_by_prompt, pool_advantages, standard_deviation
from mutualrl.regimes.needs import Needs
from mutualrl.regimes.peers import peer_rollouts
from mutualrl.regimes.regime import Problem, Regime, Settings, setting
from mutualrl.regimes.round import PPO, ExtraRow, Plan, Requests, Response, RoundView, RowSource
from mutualrl.seeds import seeded
from mutualrl.storage.metrics import Metric

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOLERANCE = 1e-6  # maximum difference between verifiers that agree


class Swarm(Regime):
    """SAPO; the source's best results have as many external as local rollouts."""

    name = "swarm"
    summary = "some own groups and some of the peers', with advantages within each group (SAPO of RL Swarm)"
    metrics = (
        Metric("swarm/local", "groups", "own groups that were kept"),
        Metric("swarm/external", "groups", "peers' groups that joined the batch"),
        Metric("swarm/denied", "groups", "peers' groups whose rewards the learner's verifier rejects"),
        Metric("swarm/unencodable", "groups", "peers' groups that the learner cannot encode"),
        Metric("swarm/rows", "rows", "peer rows that joined the batch", role="action"),
        Metric("swarm/other_prompts", "prompts", "prompts of the peer rows that the learner did not sample itself"),
    )

    local: int | None = setting(None, "I, own groups to keep; null: all with variance", ge=0)
    external: int | None = setting(None, "J, peers' groups to draw; null: as many as are kept", ge=0)
    denominator: Literal["own", "peer"] = setting(
        "own",
        "log-probs in the denominator of a peer row's ratio: the learner's snapshot, or the peer's",
        variants=("peer",),
    )
    verify: bool = setting(True, "score the peers' texts with the learner's own reward functions")
    anchor: Literal["span", "word", "char", "paper", "paper-fallback"] = setting(
        "span", "how traces are aligned (THL), with denominator: peer", acts_with={"denominator": "peer"}
    )

    @model_validator(mode="after")
    def _trains_on_something(self) -> Swarm:
        if self.local == 0 and not self.external:
            raise ValueError("local: 0 leaves only the peers' groups; expected external of 1 or more")
        if self.external == 0 and (self.denominator != "own" or not self.verify):
            raise ValueError("external: 0 draws no group: denominator and verify have no effect; leave them out")
        return self

    def needs(self) -> Needs:
        """Return that it reads texts, and with `denominator: peer` ids and log-probs, also of other prompts."""
        reads = PublishSchema.of("text", *(("token_ids", "logprobs") if self.denominator == "peer" else ()))
        return Needs(
            reads=reads, advantages="builds the batch", weighs_groups=True, selections=True, same_prompts=False
        )

    def requests(self, view: RoundView) -> Requests:
        """Return the texts of the groups that may be drawn, for the learner's verifier."""
        if not self.verify or self.external == 0:
            return Requests()
        responses: list[Response] = []
        for group in external_groups(view, self):
            responses += group.responses
        return Requests(rewards=tuple(responses))

    def plan(self, view: RoundView) -> Plan:
        """Return the batch of a round: the kept own groups and the drawn peer groups."""
        own = group_by_prompt(view.prompt_ids, view.rewards)
        kept = draw(view, "local", sorted(p for p, rewards in own.items() if has_variance(rewards)), self.local)
        groups = external_groups(view, self) if self.external != 0 else []
        varied = len(groups)
        if self.verify and self.external != 0:
            groups = [group for group in groups if confirmed(group, view.results.rewards)]
        if varied and not groups:
            logger.warning(
                "round %d: the learner's reward functions reject all %d groups of the peers; do they depend on tokens, "
                "time or randomness? (regime.verify: false uses the peers' rewards)",
                *(view.round, varied),
            )
        usable = [each for group in groups if (each := group_rows(view, self, group)) is not None]
        drawn = draw(view, "external", usable, len(kept) if self.external is None else self.external)
        rows = normalized(view, drawn)
        kept_prompts = set(kept)
        factor = kept_factor(view, kept_prompts, rows)
        advantages = [
            factor * advantage if prompt_id in kept_prompts else 0.0
            for prompt_id, advantage in zip(view.prompt_ids, view.advantages, strict=True)
        ]
        return Plan(
            advantages=tuple(advantages),
            rows=tuple(replace(row, weight=factor) for row in rows),
            metrics={
                "swarm/local": float(len(kept)),
                "swarm/external": float(len(drawn)),
                "swarm/denied": float(varied - len(groups)),
                "swarm/unencodable": float(len(groups) - len(usable)),
                "swarm/rows": float(len(rows)),
                "swarm/other_prompts": float(len({row.prompt_id for row in rows} - set(own))),
            },
        )

    def problems(self, trainer: Settings) -> list[Problem]:
        """Return (key, problem) for a loss whose mean cannot exclude dropped groups."""
        if trainer.get("loss_type") == "bnpo":
            problem = "found 'bnpo', a mean per micro-batch, from which swarm cannot drop groups; expected 'grpo'"
            return [("loss_type", problem)]
        return []


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one peer on one prompt."""

    policy: str
    prompt_id: str
    members: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the members."""
        return [member.reward for member in self.members]

    @property
    def responses(self) -> list[Response]:
        """Return the members' texts as the learner's reward functions judge them."""
        return [(self.prompt_id, member.text or "", member.ended) for member in self.members]


def has_variance(rewards: Sequence[float]) -> bool:
    """Return whether the non-NaN rewards differ."""
    values = [reward for reward in rewards if not np.isnan(reward)]
    return bool(values) and min(values) != max(values)


def external_groups(view: RoundView, settings: Swarm) -> list[Group]:
    """Return the peers' groups with variance, on prompts in the learner's data, sorted by (prompt, policy)."""
    fields = ("text", "token_ids", "logprobs") if settings.denominator == "peer" else ("text",)
    members: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in peer_rollouts(view, *fields, regime=settings.name):
        members.setdefault((rollout.prompt_id, rollout.policy), []).append(rollout)
    learner_prompts = {*view.prompt_ids, *view.other_prompts}
    groups = []
    for (prompt_id, policy), rollouts in sorted(members.items()):
        group = Group(policy, prompt_id, tuple(rollouts))
        if prompt_id in learner_prompts and has_variance(group.rewards):
            groups.append(group)
    return groups


def confirmed(group: Group, rewards: Mapping[Response, float]) -> bool:
    """Return whether the learner's verifier gives a group the rewards that it was published with."""
    scores = np.array([rewards[response] for response in group.responses], dtype=np.float64)
    return bool(np.allclose(scores, group.rewards, rtol=0, atol=TOLERANCE, equal_nan=True))


def normalized(view: RoundView, groups: Sequence[Sequence[tuple[ExtraRow, float]]]) -> list[ExtraRow]:
    """Return the rows of groups with advantages within each group."""
    batch_std = standard_deviation(view.rewards)
    rows: list[ExtraRow] = []
    for members in groups:
        rewards = [reward for _, reward in members]
        values = pool_advantages(rewards, rewards, scale=view.scale, batch_standard_deviation=batch_std)
        rows += [replace(row, advantage=float(a)) for (row, _), a in zip(members, values, strict=True)]
    return rows


def kept_factor(view: RoundView, kept: set[str], rows: Sequence[ExtraRow]) -> float:
    """Return the factor that turns the trainer's mean over all own and extra rows into the mean without the dropped
    groups: rows of the round over kept rows (tokens, if the loss is a mean over tokens)."""

    def size(rollout: Rollout) -> int:
        if view.mean_over == "rows":
            return 1
        return 0 if view.mask_truncated and not rollout.ended else rollout.length or 0

    own = sum(size(rollout) for rollout in view.rollouts)
    remaining = sum(size(rollout) for rollout in view.rollouts if rollout.prompt_id in kept)
    extra = sum(1 if view.mean_over == "rows" else int(row.covered.sum()) for row in rows)
    return (own + extra) / (remaining + extra) if remaining + extra else 1.0


def draw(view: RoundView, label: str, items: Sequence[T], count: int | None) -> list[T]:
    """Return `count` of the items, drawn without replacement, in their order; all if there are no more."""
    if count is None or count >= len(items):
        return list(items)
    order = seeded(view.run_seed, view.round, label, view.learner).permutation(len(items))
    return [items[i] for i in sorted(order[:count].tolist())]


def group_rows(view: RoundView, settings: Swarm, group: Group) -> list[tuple[ExtraRow, float]] | None:
    """Return a group on the learner's tokens, with its rewards; None if the learner cannot use a member."""
    rows = []
    for member in group.members:
        assert member.text is not None
        ids = view.transfer.to_learner_ids(member.text, member.ended)
        if ids is None:
            return None
        logprobs, mask = None, np.ones(len(ids), dtype=np.bool_)
        if settings.denominator == "peer":
            assert member.logprobs is not None
            if np.isnan(member.logprobs).any():
                return None
            (aligned,) = view.transfer.align([member], [ids], settings.anchor)
            logprobs, mask = aligned.logprobs.astype(np.float32), aligned.covered
        if view.mask_truncated and not member.ended:  # as TRL masks own rows: in the group, not in the loss
            mask = np.zeros_like(mask)
        row = ExtraRow(
            prompt_id=group.prompt_id,
            source=RowSource(group.policy, member.index, view.round),
            token_ids=ids,
            loss="policy_gradient",
            mask=mask,
            logprobs=logprobs,
            bound=PPO(),
            mean="pool",
        )
        rows.append((row, member.reward))
    return rows
