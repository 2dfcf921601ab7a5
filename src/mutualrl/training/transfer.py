"""Tokenizer Heterogeneity Layer for one learner, with real tokenizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from mutualrl.errors import UsageError
from mutualrl.regimes import Trace
from mutualrl.regimes.round import Aligned
from mutualrl.thl import Anchor, Retokenized, align_logprobs, decode_completion, retokenize_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenTransfer:
    """Conversion of peers' texts and traces to the learner's tokens.

    `max_length`: limit on a peer's text in the learner's tokens; None: no limit. `peers`: their tokenizers by name, for
    regimes that align traces. `end_token_id`: the token that ends the learner's own completions; None: its tokenizer's
    end-of-sequence token. `refused`: numbers of texts that were `too_long`, or that the tokenizer `changed`, since it
    was last cleared. `encoded`: the round's texts so far: a regime's requests and its plan ask for the same ones.
    """

    learner: PreTrainedTokenizerBase
    max_length: int | None = None
    peers: Mapping[str, PreTrainedTokenizerBase] = field(default_factory=dict)
    end_token_id: int | None = None
    refused: Counter[str] = field(default_factory=Counter)
    encoded: dict[tuple[str, bool], Retokenized] = field(default_factory=dict)

    def encode(self, responses: Sequence[tuple[str, bool]]) -> list[tuple[int, ...] | None]:
        """Return the learner's ids of every response; None if it is too long, empty or not encoded exactly."""
        new = list(dict.fromkeys(response for response in responses if response not in self.encoded))
        ids = retokenize_batch(
            [text for text, _ in new],
            self.learner,
            self.max_length,
            ended=[ended for _, ended in new],
            end_token_id=self.end_token_id,
        )
        self.encoded.update(zip(new, ids, strict=True))
        return [self._usable(self.encoded[response]) for response in responses]

    def _usable(self, encoded: Retokenized) -> tuple[int, ...] | None:
        if not encoded.exact:
            self.refused["changed"] += 1
        elif not encoded.fits:
            self.refused["too_long"] += 1
        return encoded.ids if encoded.exact and encoded.fits and encoded.ids else None

    def to_learner_ids(self, text: str, ended: bool) -> tuple[int, ...] | None:
        """Return the learner's ids of one response, as `encode` does."""
        return self.encode([(text, ended)])[0]

    def align(self, trace: Trace, ids: Sequence[int], anchor: str) -> Aligned:
        """Align a peer's trace to the tokens of `to_learner_ids`.

        Raises UsageError for a peer whose tokenizer was not passed.
        """
        if trace.policy not in self.peers:
            raise UsageError(
                f"no tokenizer of peer {trace.policy!r} was passed, and this regime needs it to align traces; "
                "pass Sharing.over(..., tokenizers={...})"
            )
        source_eos, target_eos = (trace.token_ids[-1:].tolist(), ids[-1:]) if trace.ended else ((), ())
        aligned = align_logprobs(
            trace.text,
            trace.token_ids,
            trace.logprobs,
            self.peers[trace.policy],
            self.learner,
            target_ids=ids,
            anchor=cast(Anchor, anchor),
            source_eos_ids=source_eos,
            target_eos_ids=target_eos,
        )
        covered = np.asarray(aligned.covered, dtype=np.bool_)
        logprobs = np.where(covered, aligned.logprobs, 0.0)
        return Aligned(logprobs, covered, aligned.residual, aligned.mismatched, aligned.clipped)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of the learner's ids."""
        return decode_completion(list(ids), self.learner)
