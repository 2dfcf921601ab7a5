"""Replay of recorded completions: an engine that answers with what was recorded, in order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutualrl.engines.base import Sampling
from mutualrl.errors import DataError
from mutualrl.records import Completion
from mutualrl.storage.files import write_atomic
from mutualrl.tasks.base import read_jsonl, text_field


class ReplayEngine:
    """Answers each prompt with its recorded completions, one after another. Nothing is generated."""

    name = "replay"

    def __init__(self, recorded: Mapping[str, Sequence[Completion]]) -> None:
        self._recorded = recorded
        self._next: dict[str, int] = {}

    @classmethod
    def load(cls, path: Path) -> ReplayEngine:
        """Read what `record` wrote. Raises DataError naming file, row and field."""
        recorded: dict[str, list[Completion]] = {}
        for number, row in read_jsonl(path):
            prompt = text_field(row, "prompt", path, number)
            ids, text, ended = row.get("token_ids"), row.get("text"), row.get("ended")
            fits = isinstance(ids, list) and all(type(i) is int for i in ids)
            if not fits or not isinstance(text, str) or not isinstance(ended, bool):
                raise DataError(
                    f"{path}, row {number}: expected 'token_ids' (integers), 'text' and 'ended' (true/false)"
                )
            recorded.setdefault(prompt, []).append(Completion(tuple(ids or ()), text, ended))
        return cls(recorded)

    def generate(self, prompts: Sequence[str], sampling: Sampling) -> list[list[Completion]]:
        """The next `sampling.samples` recorded completions of every prompt.

        Raises DataError when a prompt was not recorded, or has no more completions.
        """
        return [[self._take(prompt) for _ in range(sampling.samples)] for prompt in prompts]

    def _take(self, prompt: str) -> Completion:
        completions, index = self._recorded.get(prompt, ()), self._next.get(prompt, 0)
        if index >= len(completions):
            raise DataError(
                f"replay: {len(completions)} completions were recorded for the prompt {prompt[:60]!r}, "
                f"number {index + 1} was asked for"
            )
        self._next[prompt] = index + 1
        return completions[index]


def record(path: Path, prompts: Sequence[str], completions: Sequence[Sequence[Completion]]) -> None:
    """Write completions as JSON Lines that `ReplayEngine.load` reads."""
    lines = [
        json.dumps({"prompt": prompt, "token_ids": list(c.token_ids), "text": c.text, "ended": c.ended})
        for prompt, group in zip(prompts, completions, strict=True)
        for c in group
    ]
    write_atomic(path, ("\n".join(lines) + "\n").encode())
