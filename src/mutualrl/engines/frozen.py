"""Frozen model: sampled as it is, with the log-probs of what it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.engines.base import Floats
from mutualrl.engines.model_files import check_model
from mutualrl.engines.sampling import Sampling
from mutualrl.engines.scoring import completion_logprobs, context_length
from mutualrl.engines.transformers_engine import TransformersEngine
from mutualrl.records import Completion
from mutualrl.tasks.prompting import Content, Template, prompt_ids
from mutualrl.thl import retokenize
from mutualrl.thl.judged import Read
from mutualrl.thl.offsets import token_offsets, utf8

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 64  # sequences that are sampled at once


class FrozenModel:
    """Model of a frozen source, in transformers. `template`: arguments of its chat template."""

    def __init__(self, engine: TransformersEngine, template: Template) -> None:
        self._engine = engine
        self._template = template

    @classmethod
    def load(
        cls, path: str, template: Template, *, samples: int, revision: str | None, trust_remote_code: bool
    ) -> FrozenModel:
        """Load a model by path or hub id, to sample at most `ROWS` sequences at once. Raises ModelError."""
        check_model(path, revision, trust_remote_code=trust_remote_code)
        engine = TransformersEngine.load(
            path, batch_size=max(1, ROWS // samples), revision=revision, trust_remote_code=trust_remote_code
        )
        return cls(engine, template)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer."""
        return self._engine.tokenizer

    def sample(
        self, prompts: Sequence[Content], sampling: Sampling, on_batch: Callable[[int], None]
    ) -> tuple[list[list[Completion]], list[int]]:
        """Return `sampling.samples` completions of every prompt, and the number of each prompt's tokens."""
        rows = prompt_ids(prompts, self.tokenizer, self._template)
        return self._engine.generate_ids(rows, sampling, on_batch), [len(row) for row in rows]

    def read(self, answered: Sequence[tuple[Content, str]], on_batch: Callable[[int], None]) -> list[Read | None]:
        """Return how the model reads texts that ended, each given with its prompt: its tokens' places, and their
        log-probs at temperature 1, the end token's included. None where its tokenizer would change the text, and for
        what does not fit its context."""
        rows = prompt_ids([content for content, _ in answered], self.tokenizer, self._template)
        limit, kept = context_length(self._engine.model), list[int]()
        said: list[list[int]] = []
        for number, (row, (_, text)) in enumerate(zip(rows, answered, strict=True)):
            made = retokenize(text, self.tokenizer, limit - len(row), ended=True)
            if made.exact and made.fits:
                kept.append(number)
                said.append(list(made.ids))
        scored = completion_logprobs(self._engine.model, [rows[number] for number in kept], said, on_batch)
        found: list[Read | None] = [None] * len(answered)
        for number, ids, logprobs in zip(kept, said, scored, strict=True):
            text = answered[number][1]
            ends = token_offsets(ids[:-1], self.tokenizer, text)[:, 1]
            found[number] = Read(np.append(ends, len(utf8(text))), logprobs, True)
        return found

    def logprobs(
        self,
        prompts: Sequence[Content],
        completions: Sequence[Sequence[Completion]],
        temperature: float,
        on_batch: Callable[[int], None],
    ) -> list[list[Floats]]:
        """Return log p of every token of the completions under their prompt, nats, at a temperature."""
        rows = prompt_ids(prompts, self.tokenizer, self._template)
        pairs = [(row, c.token_ids) for row, group in zip(rows, completions, strict=True) for c in group]
        asked, said = [list(row) for row, _ in pairs], [list(ids) for _, ids in pairs]
        flat = iter(completion_logprobs(self._engine.model, asked, said, on_batch, temperature=temperature))
        return [[next(flat) for _ in group] for group in completions]
