"""What every regime declares: its name, its settings and what it needs of the exchange."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from mutualrl.errors import UsageError
from mutualrl.regimes.advantages import Scale, by_prompt


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


class Trace(NamedTuple):
    """A peer's response as it was sampled: its text, whether it had ended, its ids, and a log-prob for each, nats."""

    policy: str
    text: str
    ended: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float]


Aligned = tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]


class Aligner(Protocol):
    """Puts a peer's trace on the learner's tokens: log-probs, 0 where there is none, and where there is one."""

    def __call__(self, trace: Trace, ids: Sequence[int], anchor: str) -> Aligned:
        """`ids`: the learner's T tokens of the text, as `RoundView.fit` gives them. Both arrays of shape (T,)."""
        ...


def no_alignment(trace: Trace, ids: Sequence[int], anchor: str) -> Aligned:
    """The aligner where there are no tokenizers of the peers."""
    raise UsageError("this regime aligns traces: give the peers' tokenizers (Sharing.over(..., tokenizers={...}))")


@dataclass(frozen=True, slots=True)
class RoundView:
    """All that a regime may look at: one learner, one round.

    `prompt_ids`, `rewards`, `advantages` (TRL's) and `lengths` (tokens) are of the learner's own rollouts, row by row,
    over all its ranks. `scale` is the trainer's `scale_rewards`, `mask_truncated` its `mask_truncated_completions`.
    `fit` turns a peer's text (and whether it had ended) into the learner's token ids, or None when it is too long or
    cannot be carried; `align` puts a peer's trace on them. `uses` counts the pairs each prompt has given so far.
    `solutions` maps a prompt's id to the right completion that its data have, where they have one.
    """

    round: int
    learner: str
    run_seed: int
    prompt_ids: Sequence[str]
    rewards: Sequence[float]
    advantages: Sequence[float]
    lengths: Sequence[float]
    peers: Mapping[str, PeerRound]
    fit: Callable[[str, bool], tuple[int, ...] | None]
    uses: Mapping[str, int] = field(default_factory=dict)
    scale: Scale = "group"
    mask_truncated: bool = False
    align: Aligner = no_alignment
    solutions: Mapping[str, str] = field(default_factory=dict)

    def own_groups(self) -> dict[str, list[float]]:
        """Own rewards by prompt."""
        return by_prompt(self.prompt_ids, self.rewards)


@dataclass(frozen=True, slots=True)
class Pair:
    """A gated prompt and the peer success drawn for it, as the learner's token ids."""

    prompt_id: str
    policy: str
    rollout: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PeerRow:
    """A peer's rollout as a row of the learner's batch, on the learner's T tokens.

    `logprobs`, shape (T,), nats: the behaviour policy's trace, None where the learner's own snapshot stands for it.
    `covered`, shape (T,): the tokens that count in the loss.
    """

    prompt_id: str
    policy: str
    rollout: int
    advantage: float
    ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32] | None
    covered: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a regime adds to the learner's round.

    `advantages`: of the own rollouts, in the view's order, in place of TRL's; None keeps those. `pairs` join the loss
    with `weight` times their mean NLL, the mean being over the pairs (or prompts, by `normalize`) of an optimizer step.
    `rows` are peers' rollouts that join the batch; `clip` and `delta` say how their ratios are bounded. `metrics` go to
    the log under their names.
    """

    advantages: tuple[float, ...] | None = None
    pairs: tuple[Pair, ...] = ()
    weight: float = 0.0
    normalize: str = "pairs"
    rows: tuple[PeerRow, ...] = ()
    clip: str = "ppo"
    delta: float = math.inf
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegimeSpec:
    """A regime as the rest of the system sees it.

    `publishes`: names of the optional record fields that a policy puts into the exchange.
    `text_above`: with `y_text` published, only rollouts rewarded above this have their text published.
    `reads_peers`: whether a round waits for the peers (a pool of one is refused then).
    `plan`: from a view of the round to what joins the learner's update, pure; None changes nothing.
    `moves_advantages`: whether the plan has advantages of its own, made from one reward a rollout.
    `needs_solutions`: whether it learns the solutions that come with the prompts.
    """

    name: str
    summary: str
    settings: type[RegimeSettings]
    publishes: Callable[[RegimeSettings], frozenset[str]]
    text_above: Callable[[RegimeSettings], float]
    reads_peers: bool
    plan: Callable[[RoundView, RegimeSettings], RoundPlan] | None
    moves_advantages: bool = False
    needs_solutions: Callable[[RegimeSettings], bool] = lambda settings: False


def advantage_metrics(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """How advantages were changed: `NAME/sign_flips`, the share of rollouts whose advantage went between strictly
    positive and strictly negative, and `NAME/advantage_change`, the mean size of the change."""
    old, new = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not old.size:
        return {}
    return {
        f"{name}/sign_flips": float((old * new < 0).mean()),
        f"{name}/advantage_change": float(np.abs(new - old).mean()),
    }


def seeded(run_seed: int, round_: int, prompt_id: str, learner: str) -> np.random.Generator:
    """The generator of all random choices about one prompt, in one round, for one learner.

    A function of its arguments alone: ranks, timing, the order of peers and restarts do not change it.
    """
    key = f"{run_seed}\x1f{round_}\x1f{prompt_id}\x1f{learner}".encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()[:16], "big"))


def seed_of(*parts: object) -> int:
    """A seed below 2**31 that is a function of its arguments alone."""
    key = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % (2**31)


def policy_seed(run_seed: int, policy: str, rank: int) -> int:
    """Seed of a rank's sampling noise: a function of (run seed, policy name, rank), so that no two
    policies, and no two ranks, draw the same noise."""
    return seed_of(run_seed, policy, rank)
