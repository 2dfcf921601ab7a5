"""What a regime is given of the Tokenizer Heterogeneity Layer: texts and traces of peers on the learner's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from mutualrl.errors import UsageError
from mutualrl.records import Ids, Rollout
from mutualrl.trajectory import Trajectory


class Aligned(NamedTuple):
    """A peer's trace on the learner's T tokens.

    `logprobs`: shape (T,), nats, 0 where not covered; `covered`: shape (T,), the tokens with a log-prob. `residual`: R,
    the peer's mass assigned to no token, nats (delta_THL is its absolute value); `mismatched`: C_mis, the number of
    the peer's tokens with such mass; `clipped`: the part of R removed by the clip of the trace.
    """

    logprobs: npt.NDArray[np.float64]
    covered: npt.NDArray[np.bool_]
    residual: float = 0.0
    mismatched: int = 0
    clipped: float = 0.0


class EncodedRun(NamedTuple):
    """A peer's run on the learner's T tokens, as the learner would have sampled it. `mask`, shape (T,): the tokens of
    its own turns; results of tools are context. None: all."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...] | None = None


class Transfer(Protocol):
    """Tokenizer Heterogeneity Layer for one learner: texts and traces of peers on the learner's tokens."""

    def encode(self, responses: Sequence[tuple[str, bool]]) -> list[Ids | None]:
        """Return the learner's ids of every (text, ended); None where it is too long, empty or not encoded exactly."""
        ...

    def to_learner_ids(self, text: str, ended: bool) -> Ids | None:
        """Return the learner's ids of one response, as `encode` does."""
        ...

    def encode_runs(self, runs: Sequence[tuple[str, Trajectory]]) -> list[EncodedRun | None]:
        """Return every run (with its prompt's id) on the learner's tokens; None where its chat template cannot
        keep it, or it is too long."""
        ...

    def align(self, rollouts: Sequence[Rollout], ids: Sequence[Ids], anchor: str) -> list[Aligned]:
        """Align the traces of peers' rollouts with the learner's tokens of their texts, shape (T,) each."""
        ...

    def text_of(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of the learner's ids."""
        ...

    def ends_of(self, ids: Sequence[int] | Ids) -> npt.NDArray[np.int64]:
        """Return the byte of their text where each of the learner's ids ends, shape (T,); a control token ends where
        its predecessor does."""
        ...

    def shortened(self, text: str, tokens: int) -> str:
        """Return a text, cut to this many of the learner's tokens with a mark that it was."""
        ...


class UnavailableTransfer:
    """Transfer for a view whose regime reads no text."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise UsageError: there is no tokenizer, nor a chat template."""
        if name not in vars(Transfer):
            raise AttributeError(name)
        if name == "align":
            given = "give the peers' tokenizers (Sharing.over(..., tokenizers={...}))"
            raise UsageError(f"this regime aligns traces: {given}")
        raise UsageError("this round has no tokenizer: give RoundView a `transfer`")
