"""Models behind the rollouts, loaded on first use: each learner's tokens and log-probs of its peers' texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mutualrl.diagnostics.endpoints import Endpoint
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.diagnostics.rollouts import Floats, ModelRollouts
from mutualrl.errors import MutualRLError, UsageError
from mutualrl.tasks.prompting import Content, Template, prompt_ids
from mutualrl.thl import Retokenized, align_logprobs, decode_completion, end_token, last_tokens, retokenize


class ModelPool:
    """Models of a pool by policy. `templates`: chat-template arguments. `track`: makes a progress callback."""

    def __init__(
        self,
        rollouts: ModelRollouts,
        ends: Mapping[str, Endpoint],
        templates: Mapping[str, Template] | None = None,
        track: Any = None,
    ) -> None:
        self.rollouts = rollouts
        self._models = {name: LazyModel(end) for name, end in ends.items()}
        self._templates = templates or {}
        self._track = track or (lambda label, total: lambda done: None)
        self._ids: dict[tuple[int, str], list[int]] = {}
        self._ends: dict[int, int] = {}

    def missing(self) -> list[str]:
        """Return the policies without a known model."""
        return [name for name in self.rollouts.policies if name not in self._models]

    def require(self, what: str) -> None:
        """Raise UsageError, with the flags to add, when a policy has no known model."""
        if missing := self.missing():
            flags = " ".join(f"--model {name}=PATH" for name in missing)
            raise UsageError(f"{what} needs the models of {', '.join(missing)}: add {flags}")

    def model(self, policy: int) -> LazyModel:
        """Return a policy's tokenizer and model."""
        return self._models[self.rollouts.policies[policy]]

    def context(self, policy: int) -> int:
        """Return the context length of a policy's model."""
        return int(self.model(policy).engine.context)

    def prompt(self, policy: int, unit: int) -> list[int]:
        """Return the token ids of a policy's prompt. Raises UsageError when its text is not known."""

        prompt_id = self.rollouts.prompt_ids[unit]
        if (policy, prompt_id) not in self._ids:
            template = self._templates.get(self.rollouts.policies[policy])
            content = self._content(unit)
            self._ids[policy, prompt_id] = prompt_ids([content], self.model(policy).tokenizer, template)[0]
        return self._ids[policy, prompt_id]

    def _content(self, unit: int) -> Content:
        """Return the prompt's content from its task, else the text recorded with any response to it."""
        problem: MutualRLError | None = None
        try:
            content = self.rollouts.contents.get(self.rollouts.prompt_ids[unit])
            if content is not None:
                return content
        except MutualRLError as error:  # the run's data are missing; try its published texts
            problem = error
        if self.rollouts.has("x_text"):
            for policy in range(len(self.rollouts.policies)):
                text = self.rollouts.cell("x_text", policy, unit, 0)
                if isinstance(text, str):
                    return text
        raise problem or UsageError(
            f"{self.rollouts.origin}: the text of prompt {self.rollouts.prompt_ids[unit]!r} is not known: add a column "
            "'prompt'"
        )

    def text(self, policy: int, unit: int, place: int) -> str | None:
        """Return a response's text: decoded from its sampled ids where they and the tokenizer are available, else as
        recorded."""
        ids = self.rollouts.cell("token_ids", policy, unit, place) if self.rollouts.has("token_ids") else None
        if ids and self.rollouts.policies[policy] in self._models:
            decoded = decode_completion(ids, self.model(policy).tokenizer)
            if decoded:
                return decoded
        text = self.rollouts.cell("y_text", policy, unit, place) if self.rollouts.has("y_text") else None
        if isinstance(text, str):
            return text
        return "" if ids else None

    def retokenized(self, learner: int, unit: int, text: str, ended: bool) -> Retokenized:
        """Return a peer's text retokenized for the learner; the limit is the context left by the prompt."""
        room = self.context(learner) - len(self.prompt(learner, unit))
        end = self.end_token(learner) if ended else None
        return retokenize(text, self.model(learner).tokenizer, room, ended=ended, end_token_id=end)

    def end_token(self, policy: int) -> int:
        """Return the token that ends a policy's own completions, by its recorded ids if there are any."""
        if policy not in self._ends:
            model = self.model(policy)
            self._ends[policy] = end_token(model.tokenizer, model.engine.eos_token_ids, self._end_counts(policy))
        return self._ends[policy]

    def _end_counts(self, policy: int) -> Counter[int]:
        """Count the last tokens of a policy's recorded rollouts that ended."""
        rollouts = self.rollouts
        if not self.sampled or not rollouts.has("ended"):
            return Counter()
        rows = rollouts.rows_M_P_G[policy]
        chosen = rollouts.table.take(rows[rows >= 0])
        return last_tokens(zip(chosen["token_ids"].to_pylist(), chosen["ended"].to_pylist(), strict=True))

    def to_learner_ids(self, learner: int, unit: int, text: str, ended: bool) -> tuple[int, ...] | None:
        """Return the learner's ids of a peer's text; None when it is too long or unencodable."""
        retokenized = self.retokenized(learner, unit, text, ended)
        return retokenized.ids if retokenized.fits and retokenized.exact and retokenized.ids else None

    def logprobs(
        self, policy: int, units: Sequence[int], ids: Sequence[Sequence[int]], label: str = "scoring"
    ) -> list[Floats]:
        """Return log-probs of responses after the policy's own prompts, nats, per token."""
        on_batch: OnBatch = self._track(f"{self.rollouts.policies[policy]}: {label}", len(units))
        prompts = [self.prompt(policy, unit) for unit in units]
        return self.model(policy).engine.logprobs(prompts, ids, on_batch) if units else []

    def nll(self, policy: int, units: Sequence[int], ids: Sequence[Sequence[int]]) -> Floats:
        """Return the per-token mean negative log-likelihood of each response, shape (N,), nats."""
        return np.array([-values.mean() for values in self.logprobs(policy, units, ids, "NLL")], dtype=np.float64)

    def align(
        self, learner: int, peer: int, text: str, ids: Sequence[int], trace: Floats, target_ids: Sequence[int]
    ) -> tuple[Floats, Any]:
        """Return a peer's trace on the learner's tokens: log-probs (0 where uncovered) and the covered mask."""
        alignment = align_logprobs(
            text,
            ids,
            trace,
            self.model(peer).tokenizer,
            self.model(learner).tokenizer,
            target_ids=target_ids,
            source_eos_ids=self.model(peer).engine.eos_token_ids,
            target_eos_ids=self.model(learner).engine.eos_token_ids,
        )
        return np.where(alignment.covered, alignment.logprobs, 0.0), alignment.covered

    @cached_property
    def sampled(self) -> bool:
        """Return whether the sampled ids of the responses are recorded."""
        return self.rollouts.has("token_ids")
