"""Frozen model: sampled as it is, with the log-probs of what it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mutualrl.engines.base import Floats
from mutualrl.engines.model_files import check_model
from mutualrl.engines.sampling import Sampling
from mutualrl.engines.scoring import completion_logprobs
from mutualrl.engines.transformers_engine import TransformersEngine
from mutualrl.records import Completion
from mutualrl.tasks.prompting import Content, Template, prompt_ids

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
