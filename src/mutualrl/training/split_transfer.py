"""The Tokenizer Heterogeneity Layer over the ranks of a policy: the main rank plans, all encode and align a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import broadcast_object_list

from mutualrl.records import Ids, Rollout
from mutualrl.regimes.transfer import Aligned, EncodedRun
from mutualrl.training.transfer import EncodedResponse, Response, TokenTransfer
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from accelerate import Accelerator

#: rows per rank below which sending them costs more than working on them
SMALLEST = 16
T = TypeVar("T")


class Encoding(NamedTuple):
    """Texts that one rank encodes."""

    rows: Sequence[Response]

    def run(self, transfer: TokenTransfer) -> list[EncodedResponse]:
        """Return the encoded texts."""
        transfer.prepare(self.rows)
        return [transfer.encoded[response] for response in self.rows]


class GatheredAlignment(NamedTuple):
    """Traces that one rank aligns, with the learner's ids of their texts."""

    rows: Sequence[tuple[Rollout, Ids]]
    anchor: str

    def run(self, transfer: TokenTransfer) -> list[Aligned]:
        """Return the aligned traces."""
        return transfer.align([rollout for rollout, _ in self.rows], [ids for _, ids in self.rows], self.anchor)


Job = Encoding | GatheredAlignment


class SplitTransfer:
    """Transfer for the view of a round. `on_main_rank` runs the regime's function on the main rank; until it returns,
    the others work on the parts that they are sent. Every rank takes part in the same collectives, in the same order.
    The results are those of a single rank, bit for bit."""

    def __init__(self, transfer: TokenTransfer, accelerator: Accelerator) -> None:
        self.transfer = transfer
        self._accelerator = accelerator

    def on_main_rank(self, compute: Callable[[], T]) -> T:
        """Return on all ranks what `compute` returns on the main rank."""
        results: list[T | None] = [None]
        if self._accelerator.is_main_process:
            results = [compute()]
            self._send([None] * self._accelerator.num_processes)
        else:
            while (job := self._receive()) is not None:
                torch.distributed.gather_object(job.run(self.transfer), None, dst=0)
        result: T = broadcast_object_list(results, from_process=0)[0]
        return result

    # ---- the view's transfer, on the main rank

    def encode(self, responses: Sequence[Response]) -> list[Ids | None]:
        """Return the learner's ids of every response, as `TokenTransfer.encode` does."""
        new = self.transfer.missing(responses)
        if self._is_worth_splitting(len(new)):
            encoded: list[EncodedResponse] = self._split([Encoding(part) for part in self._parts(new)])
            self.transfer.encoded.update(zip(new, encoded, strict=True))
        return self.transfer.encode(responses)

    def to_learner_ids(self, text: str, ended: bool) -> Ids | None:
        """Return the learner's ids of one response."""
        return self.transfer.to_learner_ids(text, ended)

    def encode_runs(self, runs: Sequence[tuple[str, Trajectory]]) -> list[EncodedRun | None]:
        """Return every run on the learner's tokens: those of gated prompts are few, and are not split."""
        return self.transfer.encode_runs(runs)

    def align(self, rollouts: Sequence[Rollout], ids: Sequence[Ids], anchor: str) -> list[Aligned]:
        """Align peers' traces, as `TokenTransfer.align` does."""
        if not self._is_worth_splitting(len(rollouts)):
            return self.transfer.align(rollouts, ids, anchor)
        rows = list(zip(rollouts, ids, strict=True))
        aligned: list[Aligned] = self._split([GatheredAlignment(part, anchor) for part in self._parts(rows)])
        return aligned

    def ends_of(self, ids: Sequence[int] | Ids) -> npt.NDArray[np.int64]:
        """Return the byte of their text where each of the learner's ids ends."""
        return self.transfer.ends_of(ids)

    def text_of(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of the learner's ids."""
        return self.transfer.text_of(ids)

    def shortened(self, text: str, tokens: int) -> str:
        """Return a text, cut to this many of the learner's tokens."""
        return self.transfer.shortened(text, tokens)

    # ---- ranks

    def _is_worth_splitting(self, rows: int) -> bool:
        ranks: int = self._accelerator.num_processes
        return ranks > 1 and rows >= SMALLEST * ranks

    def _parts(self, rows: Sequence[T]) -> list[Sequence[T]]:
        ranks = self._accelerator.num_processes
        return [rows[rank::ranks] for rank in range(ranks)]

    def _split(self, jobs: Sequence[Job]) -> list[Any]:
        """Send the jobs to the ranks; return the results of all rows, in order."""
        self._send(jobs)
        by_rank: list[Sequence[object]] = [()] * len(jobs)
        torch.distributed.gather_object(jobs[0].run(self.transfer), by_rank, dst=0)
        return [by_rank[row % len(jobs)][row // len(jobs)] for row in range(sum(map(len, by_rank)))]

    def _send(self, jobs: Sequence[Job | None]) -> None:
        if self._accelerator.num_processes > 1:
            torch.distributed.scatter_object_list([None], list(jobs), src=0)

    def _receive(self) -> Job | None:
        received: list[Job | None] = [None]
        torch.distributed.scatter_object_list(received, None, src=0)
        return received[0]
