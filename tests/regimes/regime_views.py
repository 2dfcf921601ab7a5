"""Helpers for regime tests: in-memory peers and a learner's view of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mutualrl.records import Rollout
from mutualrl.regimes import Plan, Regime, Requests, Results, RoundView
from mutualrl.regimes.transfer import Aligned
from mutualrl.rollouts import Rollouts
from mutualrl.trajectory import Trajectory


def peer(rows: Sequence[tuple[Any, ...]], name: str = "bob") -> Rollouts:
    """Return a peer's round from rows of (prompt, reward, text, ids, trace, ended)."""
    rollouts = []
    for index, row in enumerate(rows):
        prompt_id, reward, text, ids, trace, done = (*row, *(None, None, None, True)[len(row) - 2 :])
        rollouts.append(
            Rollout(
                prompt_id,
                index,
                reward,
                done,
                trajectory=Trajectory.of_stored(text, None),
                token_ids=ids,
                logprobs=trace,
            )
        )
    return Rollouts.of(rollouts, name)


Peer = peer


def same_tokens(rollout: Rollout, ids: Sequence[int], anchor: str) -> Aligned:
    """Return the alignment between policies that share a tokenizer: a copy."""
    return Aligned(np.array(rollout.logprobs, dtype=np.float64), np.ones(len(ids), dtype=np.bool_))


class TextTransfer:
    """In-memory tokenizer layer: `fit` maps text to ids, `align` aligns a rollout's trace with ids."""

    def __init__(self, fit: Any = None, align: Any = None) -> None:
        self.to_learner_ids = fit or (lambda text, ended: tuple(text.encode()))
        self.align_one = align or same_tokens

    def encode(self, responses: Sequence[tuple[str, bool]]) -> list[Any]:
        """Encode every response."""
        return [self.to_learner_ids(text, ended) for text, ended in responses]

    def align(self, rollouts: Sequence[Rollout], ids: Sequence[Any], anchor: str) -> list[Aligned]:
        """Align every rollout."""
        return [self.align_one(rollout, each, anchor) for rollout, each in zip(rollouts, ids, strict=True)]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode the ids as bytes."""
        return bytes(list(ids)).decode()


def view(rows: Sequence[tuple[str, float]], peers: dict[str, Rollouts] | None = None, **changes: Any) -> RoundView:
    """Build a learner's round. Texts are bytes; by default, advantages are within groups and lengths are 1."""
    from mutualrl.regimes.advantages import group_by_prompt, pool_advantages, standard_deviation, ungroup

    ids, rewards = [p for p, _ in rows], [r for _, r in rows]
    scale = changes.get("scale", "group")
    local = {
        p: pool_advantages(r, r, scale=scale, batch_standard_deviation=standard_deviation(rewards))
        for p, r in group_by_prompt(ids, rewards).items()
    }
    advantages = changes.pop("advantages", ungroup(ids, local))
    lengths = changes.pop("lengths", [1] * len(ids))
    rollouts = [
        Rollout(p, index, r, True, length=length, advantage=a, token_ids=tuple(b"own"))
        for index, ((p, r), a, length) in enumerate(zip(rows, advantages, lengths, strict=True))
    ]
    transfer = TextTransfer(changes.pop("fit", None), changes.pop("align", None))
    defaults: dict[str, Any] = {
        "round": 0,
        "learner": "ada",
        "run_seed": 0,
        "rollouts": Rollouts.of(rollouts, "ada"),
        "peers": {name: named(rows, name) for name, rows in (peers or {}).items()},
        "transfer": transfer,
    }
    return RoundView(**{**defaults, **changes})


def named(rollouts: Rollouts, name: str) -> Rollouts:
    """Return rollouts in memory as those of a policy."""
    return Rollouts.of(list(rollouts), name) if type(rollouts) is Rollouts else rollouts


def plan(round_view: RoundView, regime: Regime) -> Plan:
    """Plan a round."""
    return regime.plan(round_view)


def requests(round_view: RoundView, regime: Regime) -> Requests:
    """Return a regime's first requests."""
    return regime.requests(round_view)


def answered(
    round_view: RoundView,
    regime: Regime,
    *,
    logprobs: Sequence[Any] = (),
    nll: Sequence[float] = (),
    rewards: Sequence[float] = (),
) -> RoundView:
    """Return the round with results, in the order of the regime's requests."""
    made = regime.requests(round_view)
    results = Results(
        dict(zip(made.logprobs, logprobs, strict=True)),
        dict(zip(made.nll, nll, strict=True)),
        dict(zip(made.rewards, rewards, strict=True)),
    )
    return replace(round_view, results=results)
