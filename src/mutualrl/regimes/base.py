"""What every regime declares: its name, its settings and what it needs of the exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict


class RegimeSettings(BaseModel):
    """Base of the settings that stand under `regime:` in a recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class PeerRound(Protocol):
    """A peer's records of one round, column by column (`mutualrl.see.Shard` is one)."""

    def column(self, name: str) -> list[Any]:
        """All values of a column, in the writer's order."""
        ...

    def texts(self, rows: Sequence[int]) -> list[str | None]:
        """Completion texts of the given rows."""
        ...


@dataclass(frozen=True, slots=True)
class RoundView:
    """All that a regime may look at: one learner, one round.

    `prompt_ids` and `rewards` are the learner's own rollouts, row by row, over all its ranks. `fit` turns a
    peer's text (and whether it had ended) into the learner's token ids, or None when it is too long or
    cannot be carried. `uses` counts the pairs each prompt has given so far in the run.
    """

    round: int
    learner: str
    run_seed: int
    prompt_ids: Sequence[str]
    rewards: Sequence[float]
    peers: Mapping[str, PeerRound]
    fit: Callable[[str, bool], tuple[int, ...] | None]
    uses: Mapping[str, int]

    def own_groups(self) -> dict[str, list[float]]:
        """Own rewards by prompt."""
        groups: dict[str, list[float]] = {}
        for prompt_id, reward in zip(self.prompt_ids, self.rewards, strict=True):
            groups.setdefault(prompt_id, []).append(reward)
        return groups


@dataclass(frozen=True, slots=True)
class Pair:
    """A gated prompt and the peer success drawn for it, as the learner's token ids."""

    prompt_id: str
    policy: str
    rollout: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a regime adds to the learner's round.

    `pairs` join the loss with `weight` times their mean NLL, the mean being over the pairs (or prompts,
    by `normalize`) of an optimizer step. `metrics` go to the log under their names.
    """

    pairs: tuple[Pair, ...] = ()
    weight: float = 0.0
    normalize: str = "pairs"
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegimeSpec:
    """A regime as the rest of the system sees it.

    `publishes`: names of the optional record fields that a policy puts into the exchange.
    `text_above`: with `y_text` published, only rollouts rewarded above this have their text published.
    `reads_peers`: whether a round waits for the peers (a pool of one is refused then).
    `plan`: from a view of the round to what joins the learner's update. Pure.
    """

    name: str
    summary: str
    settings: type[RegimeSettings]
    publishes: Callable[[RegimeSettings], frozenset[str]]
    text_above: Callable[[RegimeSettings], float]
    reads_peers: bool
    plan: Callable[[RoundView, RegimeSettings], RoundPlan]


def seeded(run_seed: int, round_: int, prompt_id: str, learner: str) -> np.random.Generator:
    """The generator of all random choices about one prompt, in one round, for one learner.

    A function of its arguments alone: ranks, timing, the order of peers and restarts do not change it.
    """
    key = f"{run_seed}\x1f{round_}\x1f{prompt_id}\x1f{learner}".encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:16], "big"))
