"""Batched alignment for training: lists in, padded arrays out, no NaN."""

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
    """B aligned traces, right-padded to the T tokens of the longest.

    `target_ids`, shape (B, T): the target tokens, padded with `pad_id`. `tokens`, shape (B, T): True on tokens, False
    on padding. `covered`, shape (B, T): True where the value is the peer's; a ratio mask must be 0 elsewhere.
    `logprobs`, shape (B, T), nats: the peer's value where covered, else the learner's own if passed, else 0.
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
        """Return the denominator in `own`'s device and dtype, shape (B, T): the peer's log-probs where covered, else
        `own`.

        `own`: the learner's log-probs of `target_ids`, detached in the result (ratio 1).
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
    """Align B responses with `align_logprobs`. `own_logprobs`: optionally, the learner's, one number per target token.

    Raises the errors of `align_logprobs`, with the row, and TraceError when the lists differ in length.
    """
    columns = {"source_ids": source_ids, "source_logprobs": source_logprobs} | {
        name: rows for name, rows in (("target_ids", target_ids), ("own_logprobs", own_logprobs)) if rows is not None
    }
    for name, rows in columns.items():
        if len(rows) != len(texts):
            raise TraceError(f"{name}: {len(rows)} rows for {len(texts)} texts, expected one per text")
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
    for index, row in enumerate(aligned):
        length = len(row.target_ids)
        ids[index, :length] = row.target_ids
        tokens[index, :length] = True
        covered[index, :length] = row.covered
        values[index, :length] = np.where(row.covered, row.logprobs, own[index])
    return AlignedBatch(
        target_ids=ids,
        tokens=tokens,
        logprobs=values,
        covered=covered,
        residual=np.array([row.residual for row in aligned], dtype=np.float64),
        mismatched=np.array([row.mismatched for row in aligned], dtype=np.int64),
        uncovered=(tokens & ~covered).sum(axis=1),
    )
