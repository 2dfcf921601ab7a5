"""Peers' runs with tools on a policy's tokens: what TRL's loop would have sampled on the round's prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mutualrl.adapter.rendering import Renderer
from mutualrl.adapter.trl_compat import HookedGRPOTrainer, tokenizer_of
from mutualrl.adapter.trl_tools import RecordedTurn, environment_of, rendering_settings
from mutualrl.records import Ids, plain_ids
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.tasks.trajectories import messages_of, names_of
from mutualrl.training.requests import PromptRows
from mutualrl.training.transfer import TOO_LONG
from mutualrl.trajectory import Trajectory

Run = tuple[str, Trajectory]  # with its prompt's id
#: what rendering raises: a verdict on a conversation, or content that no tokenizer or recursion takes
UNUSABLE = (ValueError, TypeError, RecursionError, IndexError)


@dataclass
class RunEncoder:
    """Encodes runs with a trainer's chat template and tools.

    `schemas_of`: environment to its tools as JSON. `chats`: the prompts of the round as messages, with what an
    environment observed; `ids`: their token ids.
    """

    trainer: HookedGRPOTrainer
    rows: PromptRows
    schemas_of: Callable[[str | None], str]
    chats: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, Ids] = field(default_factory=dict)
    _renderers: dict[str | None, Renderer] = field(default_factory=dict)
    _encoded: dict[Run, EncodedRun | str] = field(default_factory=dict)

    def begin(self, chats: Mapping[str, Any], ids: Mapping[str, Ids]) -> None:
        """Begin a round."""
        self.chats, self.ids = chats, ids
        self._encoded.clear()

    def encode(self, runs: Sequence[Run], max_length: int | None) -> list[EncodedRun | str]:
        """Return every run on the policy's tokens, or why it cannot be learnt: longer than `max_length`, or not kept by
        the chat template."""
        results = []
        for run in runs:
            if run not in self._encoded:
                self._encoded[run] = self._row(*run)
            row = self._encoded[run]
            too_long = max_length is not None and not isinstance(row, str) and len(row.ids) > max_length
            results.append(TOO_LONG if too_long else row)
        return results

    def turns(self, prompt_id: str, prompt: Any, run: Trajectory) -> list[RecordedTurn] | None:
        """Return the turns of a run to be acted again on a prompt (messages); None if this template cannot keep
        them."""
        renderer = self.renderer(environment_of(self.trainer, self.rows.row(prompt_id)))
        tokenizer, turns = tokenizer_of(self.trainer), list[RecordedTurn]()
        try:
            before = messages_of(prompt)
            for message in run.messages:
                if message.is_turn:
                    ids = tokenizer.encode(renderer.answer(before, message), add_special_tokens=False)
                    turns.append(RecordedTurn(list(ids), []))
                else:
                    turns[-1].results.append(message.text)
                before = [*before, message]
        except UNUSABLE:
            return None
        return turns

    def renderer(self, environment: str | None) -> Renderer:
        """Return the renderer with the tools of an environment."""
        if environment not in self._renderers:
            tools = json.loads(self.schemas_of(environment))
            settings = rendering_settings(self.trainer)
            self._renderers[environment] = Renderer(tokenizer_of(self.trainer), tools, settings)
        return self._renderers[environment]

    def _row(self, prompt_id: str, run: Trajectory) -> EncodedRun | str:
        """Return a run's row, or why there is none."""
        messages = run.messages
        if not messages or not messages[0].is_turn or not messages[-1].is_turn:
            return "it does not begin and end with the model's messages"
        prompt = self.chats[prompt_id] if prompt_id in self.chats else self.rows.prompt(prompt_id)
        environment = environment_of(self.trainer, self.rows.row(prompt_id))
        known = names_of(self.schemas_of(environment))
        if any(call.name not in known for call in run.calls):
            return "it calls a tool that the learner does not have"
        try:
            row = self.renderer(environment).row(messages_of(prompt), messages)
        except UNUSABLE as reason:
            return str(reason)
        if prompt_id in self.ids and row.prompt_ids != list(plain_ids(self.ids[prompt_id])):
            return "its prompt has other tokens than the round's"
        return EncodedRun(tuple(row.ids), tuple(map(bool, row.mask)))
