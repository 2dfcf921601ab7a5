"""Peer Rollout Pooling (PRP): the learner trains on its own rollouts and every peer's, normalised as one pool.

Pure functions: rewards and traces in, rows and advantages out; token log-probs in, a loss per token out. Source: paper,
Section "Regime 1: Data-level experience sharing". Own rows keep their own denominator and surrogate. Departures and
readings: a peer's row that the learner cannot carry is left out of the pool, not cut; the KL penalty stays on own rows
(its estimator holds for samples of the learner alone) at its full weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from mutualrl.errors import DataError
from mutualrl.regimes.advantages import Floats, by_prompt, deviation, in_rows, pool_advantages
from mutualrl.regimes.base import PeerRound, PeerRow, RegimeSettings, RegimeSpec, RoundPlan, RoundView, Trace

if TYPE_CHECKING:
    from torch import Tensor

Scored = tuple[PeerRow, float]

#: loss types of TRL that take a mean over rows; of the others, bnpo has the tokens of a micro-batch below its sum, and
#: dapo, cispo and vespo those of the optimizer step.
BY_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")


class PRPSettings(RegimeSettings):
    """Settings of PRP. `peer` with `ppo` is the paper's corrected pooling, `snapshot` its naive pooling."""

    denominator: Literal["peer", "snapshot"] = Field(
        "peer", description="whose log-probs stand below a peer row's ratio: the peer's, aligned, or the learner's own"
    )
    clip: Literal["ppo", "band"] = Field(
        "ppo", description="ppo: TRL's surrogate, two-sided; band: the ratio cut to [1 - eps, 1 + eps], detached"
    )
    delta: float = Field(
        4.0,
        gt=1,
        description="TRL's `delta` on peer rows, under clip: ppo (cispo, sapo, vespo bound theirs)",
    )
    anchor: Literal["span", "word", "char", "paper"] = Field("span", description="how traces are aligned (THL)")


@dataclass(frozen=True, slots=True)
class Shares:
    """Factors on the advantages of own and of peer rows that turn TRL's normaliser of own rows into the pool's."""

    own: float
    peer: float


def band_loss(logps: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-clip(rho, 1 - low, 1 + high) * A * log pi per token, the weight detached; shapes (B, T), (B, T), (B, 1).

    rho = pi / mu. Its gradient is the negative of the clipped estimator c(rho) * A * score of the paper's Theorem
    "PRP bias-variance decomposition".
    """
    weight = (logps.detach() - behaviour).exp().clamp(1 - low, 1 + high)
    return -weight * advantages * logps


def aggregate(
    per_token: Tensor, mask: Tensor, loss_type: str, *, accumulation: int, max_length: int, step_items: float
) -> Tensor:
    """TRL's mean of a per-token loss, shape (B, T), over a micro-batch: its normaliser for each `loss_type`.

    `accumulation`: micro-batches of an optimizer step. `step_items`: for dapo, cispo and vespo, the tokens of an
    optimizer step divided by the ranks. Raises ValueError for another loss type.
    """
    kept = per_token.masked_fill(~mask, 0.0)
    if loss_type in ("grpo", "sapo"):
        return (kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean() / accumulation
    if loss_type == "luspo":
        return kept.sum(dim=1).mean() / accumulation
    if loss_type == "dr_grpo":
        return kept.sum() / (len(kept) * max_length * accumulation)
    if loss_type == "bnpo":
        return kept.sum() / mask.sum().clamp(min=1) / accumulation
    if loss_type in ("dapo", "cispo", "vespo"):
        return kept.sum() / max(step_items, 1.0)
    raise ValueError(f"unknown loss type {loss_type!r}")


def shares(
    loss_type: str, *, own: float, peers: float, chunk: float = 1.0, micro_batches: int = 1, ranks: int = 1
) -> Shares:
    """Factors by which the loss of own rows and of a chunk of peer rows add up to the loss of the pool.

    For a mean over rows (`BY_ROWS`): `own` and `peers` are the rows of the optimizer step over all ranks, `chunk` the
    rows of the chunk, `micro_batches` and `ranks` those of the step. For bnpo: the tokens of the micro-batch, `chunk`
    those of the chunk. For the others: the tokens of the generation batch, and TRL is given their sum for the chunk.
    """
    total = max(own + peers, 1.0)
    if loss_type in BY_ROWS:
        return Shares(own / total, chunk * micro_batches * ranks / total)
    return Shares(own / total, chunk / total if loss_type == "bnpo" else 1.0)


def pool(
    own: Mapping[str, Sequence[float]], rows: Sequence[Scored], scale: str
) -> tuple[dict[str, Floats], list[PeerRow]]:
    """Advantages of own rollouts by prompt, and the rows with theirs: normalised over own and peers' together."""
    rewards: dict[str, list[float]] = {}
    for row, reward in rows:
        rewards.setdefault(row.prompt_id, []).append(reward)
    pools = {prompt: [*group, *rewards.get(prompt, ())] for prompt, group in own.items()}
    every = deviation([reward for values in pools.values() for reward in values])
    advantages = {
        prompt: pool_advantages(values, values, scale=scale, batch_deviation=every) for prompt, values in pools.items()
    }
    mine = {prompt: values[: len(own[prompt])] for prompt, values in advantages.items()}
    theirs = {prompt: iter(values[len(own[prompt]) :].tolist()) for prompt, values in advantages.items()}
    return mine, [replace(row, advantage=next(theirs[row.prompt_id])) for row, _ in rows]


def peer_rows(view: RoundView, settings: PRPSettings) -> tuple[list[Scored], int]:
    """Every peer rollout that the learner can carry, with its reward, sorted by (prompt, policy, rollout); and how
    many it cannot."""
    found, unfit = [], 0
    for name, peer in sorted(view.peers.items()):
        for row in _rows(name, peer, traced=settings.denominator == "peer"):
            ids = view.fit(row.text, row.ended)
            traced = settings.denominator == "peer"
            if ids is None or (traced and np.isnan(row.trace).any()):  # a token that the engine could not score
                unfit += 1
                continue
            logprobs, covered = None, np.ones(len(ids), dtype=np.bool_)
            if traced:
                trace = Trace(name, row.text, row.ended, row.ids, row.trace)
                values, covered = view.align(trace, ids, settings.anchor)
                logprobs = values.astype(np.float32)
            if view.mask_truncated and not row.ended:  # as TRL does with own rows: in the pool, not in the loss
                covered = np.zeros_like(covered)
            found.append((PeerRow(row.prompt_id, name, row.rollout, 0.0, ids, logprobs, covered), row.reward))
    found.sort(key=lambda entry: (entry[0].prompt_id, entry[0].policy, entry[0].rollout))
    return found, unfit


@dataclass(frozen=True, slots=True)
class _Row:
    prompt_id: str
    rollout: int
    reward: float
    ended: bool
    text: str
    ids: Sequence[int]
    trace: Sequence[float]


def _rows(name: str, peer: PeerRound, *, traced: bool) -> list[_Row]:
    columns = [peer.column(c) for c in ("prompt_id", "rollout", "reward", "ended", "y_text", "token_ids", "logprobs")]
    rows = [_Row(*values) for values in zip(*columns, strict=True)]
    for row in rows:
        if row.text is None or (traced and (row.ids is None or row.trace is None)):
            raise DataError(
                f"policy {name!r} published no text, ids or trace of rollout {row.rollout} on {row.prompt_id!r}; "
                "regime prp needs them of every policy of the pool"
            )
    return rows


def plan(view: RoundView, settings: RegimeSettings) -> RoundPlan:
    """The pool of a round: own advantages over it, and the peers' rows. Without peers nothing changes."""
    assert isinstance(settings, PRPSettings)
    scored, unfit = peer_rows(view, settings)
    if not scored:
        return RoundPlan(metrics={"prp/unfit": float(unfit), "prp/rows": 0.0})
    mine, rows = pool(by_prompt(view.prompt_ids, view.rewards), scored, view.scale)
    tokens = sum(len(row.ids) for row in rows)
    covered = sum(int(row.covered.sum()) for row in rows)
    return RoundPlan(
        advantages=in_rows(view.prompt_ids, mine),
        rows=tuple(rows),
        clip=settings.clip,
        delta=settings.delta,
        metrics={
            "prp/rows": float(len(rows)),
            "prp/unfit": float(unfit),
            "prp/extra_tokens": float(tokens),
            "prp/uncovered": (tokens - covered) / max(tokens, 1),
        },
    )


def _publishes(settings: RegimeSettings) -> frozenset[str]:
    assert isinstance(settings, PRPSettings)
    return frozenset({"y_text"} if settings.denominator == "snapshot" else {"y_text", "token_ids", "logprobs"})


SPEC = RegimeSpec(
    name="prp",
    summary="own and peers' rollouts as one batch, with the peers' aligned traces as denominators",
    settings=PRPSettings,
    publishes=_publishes,
    text_above=lambda settings: float("-inf"),
    reads_peers=True,
    plan=plan,
    moves_advantages=True,
)
