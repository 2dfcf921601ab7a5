"""Losses of extra rows as pure functions: token log-probs in, a loss out. Shapes (B, T): rows, tokens.

Sources: paper, Sections "Regime 1: Data-level experience sharing" (pool, band) and "Regime 3: Outcome-level experience
sharing" (NLL); GSPO, arXiv 2507.18071 (sequence-level ratio); HACPO, arXiv 2603.02604 (step-wise clip).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mutualrl.regimes.round import Band, Bound, Stepwise, UpperBound

if TYPE_CHECKING:
    from torch import Tensor

#: TRL's loss types that average over rows; of the others, bnpo divides by the tokens of a micro-batch, and dapo, cispo
#: and vespo by those of the optimizer step.
BY_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")


# ---- negative log-likelihood


def row_nll(logps_R_T: Tensor, mask_R_T: Tensor, reduce: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return the negative log-likelihood of each row, shape (R,): its mean per token, or its sum.

    Masked tokens are filled rather than multiplied by 0, so that a -inf there cannot become NaN. A row without tokens
    gives 0, with gradient 0.
    """
    total = -logps_R_T.masked_fill(~mask_R_T, 0.0).sum(dim=1)
    return total if reduce == "sum" else total / mask_R_T.sum(dim=1).clamp(min=1)


def nll_loss(nll_R: Tensor, *, weight: float | Tensor, count: int, ranks: int) -> Tensor:
    """Return this chunk's part of (1 / count) * sum over the step's rows of weight * NLL.

    `weight`: one number, or one per row. `count`: number of rows, tokens or prompts in the optimizer step, over all
    ranks and micro-batches. Gradients are averaged over ranks and summed over micro-batches, hence only the factor
    `ranks`.
    """
    return (nll_R * (weight * ranks / max(count, 1))).sum()


# ---- policy gradient


def bounded_loss(
    bound: Bound,
    logps: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    mini_batch: int = 0,
) -> Tensor:
    """Return the per-token loss under a bound that TRL's loss does not have; shapes (B, T), advantages (B, 1).

    `low`, `high`: the trainer's epsilon_low and epsilon_high, which `Band` uses. `mini_batch`: index of the optimizer
    step in the round, which `Stepwise` uses. Raises ValueError for any other bound.
    """
    if isinstance(bound, Band):
        return band_loss(logps, behaviour, advantages, low, high)
    if isinstance(bound, UpperBound):
        return upper_bound_loss(logps, behaviour, advantages, bound.cap)
    if isinstance(bound, Stepwise):
        return stepwise_loss(logps, behaviour, advantages, mask, bound, mini_batch)
    raise ValueError(f"{bound!r} is TRL's own surrogate")


def band_loss(logps: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return -clip(rho, 1 - low, 1 + high) * A * log pi per token, the weight detached.

    rho = pi / mu. Its gradient is the negative of the clipped estimator c(rho) * A * score of the paper's Theorem
    "PRP bias-variance decomposition".
    """
    weight = (logps.detach() - behaviour).exp().clamp(1 - low, 1 + high)
    return -weight * advantages * logps


def upper_bound_loss(logps: Tensor, behaviour: Tensor, advantages: Tensor, cap: float) -> Tensor:
    """Return -min(rho, cap) * A * log pi per token, the weight detached: truncated importance sampling."""
    weight = (logps.detach() - behaviour).exp().clamp(max=cap)
    return -weight * advantages * logps


def stepwise_loss(
    logps: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, bound: Stepwise, mini_batch: int
) -> Tensor:
    """Return -c * detach(c)^alpha * A at every token of a row, c = clamp(s, 1 - low + step * mini_batch, 1).

    s = exp(mean over its tokens of log rho), |log s| <= max_log_ratio. A row whose s is clipped has no gradient.
    Source: HACPO, arXiv 2603.02604.
    """
    log_ratio = mean_log_ratio(logps, behaviour, mask).clamp(-bound.max_log_ratio, bound.max_log_ratio)
    lowest = min(1.0, 1 - bound.low + bound.step * mini_batch)
    clipped = log_ratio.exp().clamp(lowest, 1.0)[:, None]
    loss: Tensor = -clipped * clipped.detach() ** bound.alpha * advantages
    return loss.expand_as(logps)


def mean_log_ratio(logps: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of log rho over a row's unmasked tokens, shape (B,)."""
    return (logps - behaviour).masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def aggregate(
    per_token: Tensor, mask: Tensor, loss_type: str, *, accumulation: int, max_length: int, step_items: float
) -> Tensor:
    """Return TRL's mean of a per-token loss over a micro-batch, with the normaliser of its `loss_type`.

    `accumulation`: micro-batches of an optimizer step. `step_items`: for dapo, cispo and vespo, the tokens of an
    optimizer step divided by the ranks. Raises ValueError for an unknown loss type.
    """
    masked = per_token.masked_fill(~mask, 0.0)
    if loss_type in ("grpo", "sapo"):
        return (masked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean() / accumulation
    if loss_type == "luspo":
        return masked.sum(dim=1).mean() / accumulation
    if loss_type == "dr_grpo":
        return masked.sum() / (len(masked) * max_length * accumulation)
    if loss_type == "bnpo":
        return masked.sum() / mask.sum().clamp(min=1) / accumulation
    if loss_type in ("dapo", "cispo", "vespo"):
        return masked.sum() / max(step_items, 1.0)
    raise ValueError(f"unknown loss type {loss_type!r}")


@dataclass(frozen=True, slots=True)
class NormalizerFactors:
    """Factors on the advantages of own and extra rows that turn TRL's normaliser of own rows into the pool's."""

    own: float
    extra: float


def normalizer_factors(
    loss_type: str, *, own: float, extra: float, chunk: float = 1.0, micro_batches: int = 1, ranks: int = 1
) -> NormalizerFactors:
    """Return the factors with which the losses of own rows and of chunks of extra rows sum to the loss of the pool.

    For a mean over rows (`BY_ROWS`): `own` and `extra` are the rows of the optimizer step over all ranks, `chunk` the
    rows of the chunk, `micro_batches` and `ranks` those of the step. For bnpo: the tokens of the micro-batch, `chunk`
    those of the chunk. For the others: the tokens of the generation batch; TRL receives their sum for the chunk.
    """
    total = max(own + extra, 1.0)
    if loss_type in BY_ROWS:
        return NormalizerFactors(own / total, chunk * micro_batches * ranks / total)
    return NormalizerFactors(own / total, chunk / total if loss_type == "bnpo" else 1.0)
