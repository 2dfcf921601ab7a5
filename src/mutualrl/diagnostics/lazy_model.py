"""One endpoint of a diagnostic: a tokenizer and its model, each loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mutualrl.diagnostics.endpoints import Endpoint
from mutualrl.engines.base import ScoringEngine
from mutualrl.errors import TextMismatchError
from mutualrl.thl import end_token, retokenize
from mutualrl.thl.offsets import locate_tokens, utf8
from mutualrl.thl.paper import tokenize
from mutualrl.thl.table import table_of
from mutualrl.thl.units import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: takes the number of newly completed rows
OnBatch = Callable[[int], None]


@dataclass
class LazyModel:
    """One endpoint of a pair: a tokenizer and its model, each loaded on first use."""

    endpoint: Endpoint

    @property
    def name(self) -> str:
        """Return its name in the pair's tables."""
        return self.endpoint.name

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ModelError when it cannot be loaded."""
        return self.endpoint.tokenizer()

    @cached_property
    def engine(self) -> ScoringEngine:
        """Return the model in an engine. Raises ModelError when it cannot be loaded."""
        return self.endpoint.engine()

    @cached_property
    def end_token(self) -> int:
        """Return the token that ends the model's completions (`thl.end_token`). Raises TokenizerError without one."""
        return end_token(self.tokenizer, self.endpoint.eos_token_ids(self.tokenizer))

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a text at the start of a document; None when none decode to it."""
        table = table_of(self.tokenizer)
        for encode in (tokenize, lambda text, tokenizer: list(retokenize(text, tokenizer).ids)):
            ids: list[int] = encode(text, self.tokenizer)
            try:
                locate_tokens(table.check(ids), table, utf8(text))
            except TextMismatchError:
                continue
            return ids
        return None

    def score(self, texts: Sequence[Sequence[int]], on_batch: OnBatch | None = None) -> list[Floats]:
        """Return log-probs of every token of texts after a start token, nats."""
        from mutualrl.engines.scoring import start_token

        return self.engine.text_logprobs(start_token(self.tokenizer), texts, on_batch)
