"""Peers' rollouts of a round, read in one way by all regimes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mutualrl.errors import DataError
from mutualrl.records import Ids, Rollout
from mutualrl.regimes.round import RoundView


def peer_rewards(view: RoundView) -> dict[str, list[float]]:
    """Return all peers' rewards by prompt, the peers sorted by name. Nothing else is read."""
    rewards: dict[str, list[float]] = {}
    for _, peer in sorted(view.peers.items()):
        for prompt_id, reward in zip(peer.prompt_ids, peer.rewards, strict=True):
            rewards.setdefault(prompt_id, []).append(reward)
    return rewards


def peer_rollouts(view: RoundView, *fields: str, regime: str = "") -> Iterator[Rollout]:
    """Yield the peers' rollouts, the peers sorted by name, each in its writer's order. `fields`: some of text,
    token_ids and logprobs, which every rollout must then have; the others are None. Raises DataError naming one that
    has not."""
    for name, peer in sorted(view.peers.items()):
        for rollout in peer.rows(*fields):
            missing = [field for field in fields if getattr(rollout, field) is None]
            if missing:
                raise DataError(
                    f"policy {name!r} published no {' and no '.join(missing)} of rollout {rollout.index} on "
                    f"{rollout.prompt_id!r}; regime {regime} needs them from every policy of the pool"
                )
            yield rollout


def encoded(view: RoundView, rollouts: Sequence[Rollout]) -> list[Ids | None]:
    """Return the learner's ids of the rollouts' texts, in one batch; None for one that it cannot encode or use."""
    return view.transfer.encode([(rollout.text or "", rollout.ended) for rollout in rollouts])
