"""Peers' rollouts of a round, read in one way by all regimes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mutualrl.errors import DataError
from mutualrl.regimes.round import RoundView


@dataclass(frozen=True, slots=True)
class PeerRollout:
    """Peer's rollout: its policy, its row in the peer's round, and its record. `text`, `token_ids` and `logprobs` are
    None unless they were asked for."""

    policy: str
    row: int
    prompt_id: str
    index: int
    reward: float
    ended: bool
    text: str | None = None
    token_ids: npt.NDArray[np.int64] | None = None
    logprobs: npt.NDArray[np.float64] | None = None


def peer_rewards(view: RoundView) -> dict[str, list[float]]:
    """Return all peers' rewards by prompt, the peers sorted by name. Nothing else is read."""
    rewards: dict[str, list[float]] = {}
    for _, peer in sorted(view.peers.items()):
        for prompt_id, reward in zip(peer.column("prompt_id"), peer.column("reward"), strict=True):
            rewards.setdefault(prompt_id, []).append(reward)
    return rewards


def peer_rollouts(view: RoundView, *fields: str, regime: str = "") -> Iterator[PeerRollout]:
    """Yield the peers' rollouts, the peers sorted by name, each in its writer's order. `fields`: some of text,
    token_ids and logprobs, which every rollout must then have. Raises DataError naming one that has not."""
    for name, peer in sorted(view.peers.items()):
        columns = [peer.column(c) for c in ("prompt_id", "rollout", "reward", "ended")]
        optional = [peer.column("y_text") if field == "text" else peer.arrays(field) for field in fields]
        for row, (prompt_id, index, reward, ended, *values) in enumerate(zip(*columns, *optional, strict=True)):
            missing = [field for field, value in zip(fields, values, strict=True) if value is None]
            if missing:
                raise DataError(
                    f"policy {name!r} published no {' and no '.join(missing)} of rollout {index} on {prompt_id!r}; "
                    f"regime {regime} needs them from every policy of the pool"
                )
            given = dict(zip(fields, values, strict=True))
            yield PeerRollout(name, row, prompt_id, index, reward, ended, **given)


def encoded(view: RoundView, rollouts: Sequence[PeerRollout]) -> list[tuple[int, ...] | None]:
    """Return the learner's ids of the rollouts' texts, in one batch; None for one that it cannot encode or use."""
    return view.transfer.encode([(rollout.text or "", rollout.ended) for rollout in rollouts])
