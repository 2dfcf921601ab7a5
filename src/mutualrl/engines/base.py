"""Generation outside training, behind one Protocol: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mutualrl.engines.sampling import Sampling
from mutualrl.records import Completion

Floats = npt.NDArray[np.float64]


class Engine(Protocol):
    """Model that completes prompts given as token ids: the interface that callers use."""

    name: str

    @property
    def context(self) -> int:
        """Return the context length of the model, prompt and completion together."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Return the tokens that end a completion."""
        ...

    def generate_ids(
        self, ids: Sequence[list[int]], sampling: Sampling, on_batch: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Return `sampling.samples` completions of every prompt, in the prompts' order; `on_batch` receives the
        number of prompts done."""
        ...

    def close(self) -> None:
        """Free the model's memory."""
        ...


class ScoringEngine(Engine, Protocol):
    """Engine that also returns the log-probs of given tokens."""

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        on_batch: Callable[[int], None] | None = None,
    ) -> list[Floats]:
        """Return log p of every completion token, nats, at temperature 1, one array per row."""
        ...

    def text_logprobs(
        self, start_id: int, texts: Sequence[Sequence[int]], on_batch: Callable[[int], None] | None = None
    ) -> list[Floats]:
        """Return log p of every token of texts after a start token, nats, in windows of the context."""
        ...
