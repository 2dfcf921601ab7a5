"""Tokenizer Heterogeneity Layer for one learner, with real tokenizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from mutualrl.errors import UsageError
from mutualrl.records import Ids, Rollout, plain_ids
from mutualrl.regimes.hints import first_tokens
from mutualrl.regimes.transfer import Aligned, EncodedRun
from mutualrl.tasks.base import CHARACTERS_PER_TOKEN
from mutualrl.tasks.messages import continued
from mutualrl.thl import Anchor, align_logprobs, decode_completion, retokenize
from mutualrl.thl.offsets import token_offsets
from mutualrl.thl.rows import Traced, align_spans, encode_exactly
from mutualrl.thl.table import table_of
from mutualrl.thl.text import end_id
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Response = tuple[str, bool]  # text, whether it had ended
#: texts per call of the tokenizer: enough for every core, and the tokenizer's own records of them stay small
CHUNK = 128
#: why a run is left out that is longer than the learner's completions
TOO_LONG = "it is too long"


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """A response on the learner's tokens, or why the learner cannot use it (`too_long`, `changed`, `reasoning`; None:
    it is empty). `exact`: its tokens but the last, if it ended, spell the text."""

    ids: Ids | None
    refusal: str | None = None
    exact: bool = False


@dataclass(frozen=True)
class TokenTransfer:
    """Conversion of peers' texts and traces to the learner's tokens.

    `max_length`: limit on a peer's text in the learner's tokens; None: no limit. `peers`: their tokenizers by name, for
    regimes that align traces. `end_token_id`: the token that ends the learner's own completions; None: its tokenizer's
    end-of-sequence token. `opened`: the learner's prompts end within a block of reasoning that they open: what is
    taught does not open it again, and has its end. `traced`: traces are aligned, which are of whole texts. `refused`:
    numbers of texts that were `too_long`, that the tokenizer `changed`, or that have no `reasoning` where it is opened,
    since it was last cleared. `encoded`: the round's texts so far: a regime's requests and its plan ask for the same
    ones. `runs`: encodes runs with tools of at most
    this length, or says why not; None without tools.
    """

    learner: PreTrainedTokenizerBase
    max_length: int | None = None
    peers: Mapping[str, PreTrainedTokenizerBase] = field(default_factory=dict)
    end_token_id: int | None = None
    opened: bool = False
    traced: bool = False
    refused: Counter[str] = field(default_factory=Counter)
    encoded: dict[Response, EncodedResponse] = field(default_factory=dict)
    runs: Callable[[Sequence[tuple[str, Trajectory]], int | None], list[EncodedRun | str]] | None = None

    def missing(self, responses: Iterable[Response]) -> list[Response]:
        """Return the distinct responses that are not encoded yet."""
        return list(dict.fromkeys(response for response in responses if response not in self.encoded))

    def prepare(self, responses: Iterable[Response]) -> None:
        """Encode responses that a regime may ask for."""
        new = self.missing(responses)
        if self.opened:
            for text, ended in new:
                taught = continued(text, ended=ended)
                if taught is None or (taught != text and self.traced):
                    self.encoded[text, ended] = EncodedResponse(None, "reasoning")
                elif taught != text:
                    self.encoded[text, ended] = self._encoded(taught, ended)
            new = self.missing(new)
        for start in range(0, len(new), CHUNK):
            chunk = new[start : start + CHUNK]
            exact = encode_exactly([text for text, _ in chunk], self.learner)
            for response, ids in zip(chunk, exact, strict=True):
                self.encoded[response] = self._encoded(*response) if ids is None else self._fitting(ids, response[1])

    def _fitting(self, ids: Ids, ended: bool) -> EncodedResponse:
        """Return a response whose text `ids` encode exactly."""
        if ended:
            end = end_id(self.learner) if self.end_token_id is None else self.end_token_id
            ids = np.append(ids, np.int32(end))
        if self.max_length is not None and len(ids) > self.max_length:
            return EncodedResponse(None, "too_long")
        return EncodedResponse(ids, exact=True)

    def _encoded(self, text: str, ended: bool) -> EncodedResponse:
        """Return a response whose text needs the rules of `retokenize`."""
        result = retokenize(text, self.learner, self.max_length, ended=ended, end_token_id=self.end_token_id)
        if not result.exact:
            return EncodedResponse(None, "changed")
        if not result.fits:
            return EncodedResponse(None, "too_long")
        return EncodedResponse(np.array(result.ids, dtype=np.int32) if result.ids else None)

    def encode(self, responses: Sequence[Response]) -> list[Ids | None]:
        """Return the learner's ids of every response; None if it is too long, empty or not encoded exactly."""
        self.prepare(responses)
        results = [self.encoded[response] for response in responses]
        self.refused.update(result.refusal for result in results if result.refusal is not None)
        return [result.ids for result in results]

    def to_learner_ids(self, text: str, ended: bool) -> Ids | None:
        """Return the learner's ids of one response, as `encode` does."""
        return self.encode([(text, ended)])[0]

    def encode_runs(self, runs: Sequence[tuple[str, Trajectory]]) -> list[EncodedRun | None]:
        """Return every run (with its prompt's id) on the learner's tokens; None where it cannot keep it. Without tools
        there is no run that it could have sampled."""
        if self.runs is None:
            return [None] * len(runs)
        rows = self.runs(runs, self.max_length)
        self.refused["too_long"] += rows.count(TOO_LONG)
        return [None if isinstance(row, str) else row for row in rows]

    def align(self, rollouts: Sequence[Rollout], ids: Sequence[Ids], anchor: str) -> list[Aligned]:
        """Align peers' traces to the tokens of `encode`.

        Raises UsageError for a peer whose tokenizer was not passed.
        """
        by_policy: dict[str, list[int]] = {}
        for row, rollout in enumerate(rollouts):
            by_policy.setdefault(rollout.policy, []).append(row)
        aligned: dict[int, Aligned] = {}
        if anchor == "span":
            for policy, rows in by_policy.items():
                aligned |= self._aligned_spans(policy, [(row, rollouts[row], ids[row]) for row in rows])
        return [
            aligned[row] if row in aligned else self._align(rollout, ids[row], anchor)
            for row, rollout in enumerate(rollouts)
        ]

    def _aligned_spans(self, policy: str, rows: Sequence[tuple[int, Rollout, Ids]]) -> dict[int, Aligned]:
        """Return the alignments of one peer's rows that need no rule beyond spans, by row."""
        traced = []
        for _, rollout, ids in rows:
            assert rollout.text is not None and rollout.token_ids is not None and rollout.logprobs is not None
            known = self.encoded.get((rollout.text, rollout.ended))
            exact = known is not None and known.exact and known.ids is ids
            traced.append(Traced(rollout.text, rollout.token_ids, rollout.logprobs, ids, rollout.ended, exact))
        values = align_spans(traced, table_of(self._tokenizer_of(policy)), table_of(self.learner))
        aligned = {}
        for (row, _, _), logprobs in zip(rows, values, strict=True):
            if logprobs is not None:
                aligned[row] = Aligned(logprobs, np.ones(len(logprobs), dtype=np.bool_))
        return aligned

    def _tokenizer_of(self, policy: str) -> PreTrainedTokenizerBase:
        if policy not in self.peers:
            raise UsageError(
                f"no tokenizer of peer {policy!r} was passed, and this regime needs it to align traces; "
                "pass Sharing.over(..., tokenizers={...})"
            )
        return self.peers[policy]

    def _align(self, rollout: Rollout, ids: Ids, anchor: str) -> Aligned:
        assert rollout.text is not None and rollout.token_ids is not None and rollout.logprobs is not None
        source_eos, target_eos = (rollout.token_ids[-1:].tolist(), ids[-1:].tolist()) if rollout.ended else ((), ())
        aligned = align_logprobs(
            rollout.text,
            rollout.token_ids,
            rollout.logprobs,
            self._tokenizer_of(rollout.policy),
            self.learner,
            target_ids=ids,
            anchor=cast(Anchor, anchor),
            source_eos_ids=source_eos,
            target_eos_ids=target_eos,
        )
        covered = np.asarray(aligned.covered, dtype=np.bool_)
        logprobs = np.where(covered, aligned.logprobs, 0.0)
        return Aligned(logprobs, covered, aligned.residual, aligned.mismatched, aligned.clipped)

    def shortened(self, text: str, tokens: int) -> str:
        """Return a text, cut to this many of the learner's tokens with a mark that it was."""
        kept, _ = first_tokens(text[: CHARACTERS_PER_TOKEN * tokens], self.learner, tokens)
        return text if kept == text else f"{kept} [...]"

    def ends_of(self, ids: Sequence[int] | Ids) -> npt.NDArray[np.int64]:
        """Return the byte of their text where each of the learner's ids ends."""
        return token_offsets(plain_ids(ids), self.learner)[:, 1]

    def text_of(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of the learner's ids."""
        return decode_completion(plain_ids(ids), self.learner)
