"""Alignment of a batch for training: lists in, padded arrays out, no NaN anywhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mutualrl.errors import TraceError
from mutualrl.thl.align import BOUND, DEFAULT_ANCHOR, Alignment, Anchor, align_logprobs, check_trace
from mutualrl.thl.offsets import Bools
from mutualrl.thl.units import Floats
from mutualrl.thl.words import Unit

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class AlignedBatch:
    """B aligned traces, padded on the right to the T tokens of the longest.

    `target_ids`, shape (B, T): the target tokens, `pad_id` behind them. `tokens`, shape (B, T): True on them, False on
    the padding. `covered`, shape (B, T): where the value is the peer's; elsewhere the mask of a ratio must be 0.
    `logprobs`, shape (B, T), nats: the peer's value where covered, the learner's own where it was given, else 0.
    `residual`, `mismatched`, `uncovered`, shape (B,): R, C_mis, and the number of target tokens without a value.
    """

    target_ids: npt.NDArray[np.int64]
    tokens: Bools
    logprobs: Floats
    covered: Bools
    residual: Floats
    mismatched: npt.NDArray[np.int64]
    uncovered: npt.NDArray[np.int64]

    def behaviour(self, own: Tensor) -> Tensor:
        """Return the denominator on `own`'s device and dtype, shape (B, T): the peer's log-probs where covered, else
        `own`.

        `own`: the learner's log-probs of `target_ids`; what is taken from them carries no gradient (ratio 1).
        """
        import torch

        if tuple(own.shape) != self.logprobs.shape:
            raise TraceError(f"own log-probs of shape {tuple(own.shape)}, expected {self.logprobs.shape}")
        values = torch.as_tensor(self.logprobs, device=own.device, dtype=own.dtype)
        return torch.where(torch.as_tensor(self.covered, device=own.device), values, own.detach())


def align_batch(
    texts: Sequence[str],
    source_ids: Sequence[Sequence[int]],
    source_logprobs: Sequence[npt.ArrayLike],
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    *,
    target_ids: Sequence[Sequence[int]] | None = None,
    own_logprobs: Sequence[npt.ArrayLike] | None = None,
    anchor: Anchor = DEFAULT_ANCHOR,
    unit: Unit = "auto",
    bound: float = BOUND,
    pad_id: int = 0,
    source_eos_ids: Collection[int] | None = None,
    target_eos_ids: Collection[int] | None = None,
) -> AlignedBatch:
    """Return `align_logprobs` for B responses. `own_logprobs`: the learner's, one number a target token, where there
    are any.

    Raises what `align_logprobs` raises, with the row, and TraceError when the lists differ in length.
    """
    given = {"source_ids": source_ids, "source_logprobs": source_logprobs} | {
        name: rows for name, rows in (("target_ids", target_ids), ("own_logprobs", own_logprobs)) if rows is not None
    }
    for name, rows in given.items():
        if len(rows) != len(texts):
            raise TraceError(f"{name}: {len(rows)} rows for {len(texts)} texts, expected one for each")
    aligned, own = [], []
    for row, text in enumerate(texts):
        try:
            aligned.append(
                align_logprobs(
                    text,
                    source_ids[row],
                    source_logprobs[row],
                    source_tokenizer,
                    target_tokenizer,
                    target_ids=None if target_ids is None else target_ids[row],
                    anchor=anchor,
                    unit=unit,
                    bound=bound,
                    source_eos_ids=source_eos_ids,
                    target_eos_ids=target_eos_ids,
                )
            )
            length = len(aligned[-1].target_ids)
            own.append(np.zeros(length) if own_logprobs is None else check_trace(own_logprobs[row], length))
        except ValueError as error:
            error.add_note(f"in row {row} of the batch")
            raise
    return _padded(aligned, own, pad_id)


def _padded(aligned: Sequence[Alignment], own: Sequence[Floats], pad_id: int) -> AlignedBatch:
    shape = (len(aligned), max((len(row.target_ids) for row in aligned), default=0))
    ids = np.full(shape, pad_id, dtype=np.int64)
    tokens, covered = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    values = np.zeros(shape)
    for at, row in enumerate(aligned):
        length = len(row.target_ids)
        ids[at, :length] = row.target_ids
        tokens[at, :length] = True
        covered[at, :length] = row.covered
        values[at, :length] = np.where(row.covered, row.logprobs, own[at])
    return AlignedBatch(
        target_ids=ids,
        tokens=tokens,
        logprobs=values,
        covered=covered,
        residual=np.array([row.residual for row in aligned], dtype=np.float64),
        mismatched=np.array([row.mismatched for row in aligned], dtype=np.int64),
        uncovered=(tokens & ~covered).sum(axis=1),
    )
