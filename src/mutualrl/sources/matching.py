"""Match of recorded prompts with a task's: by id, else by text after whitespace normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mutualrl.records import Prompt
from mutualrl.sources.layouts import PROMPTS, RecordedRow
from mutualrl.tasks.base import normalized

#: instructions that public data sets put before or after a problem
INSTRUCTIONS = (
    "Return your final response within \\boxed{}.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
    "Let's think step by step and output the final answer within \\boxed{}.",
)


class PromptIndex:
    """Prompts of a task by id and by text.

    Known texts of a prompt: its own, its last user message, the raw columns of its row (`problem`, `question`, ...),
    its text without what all prompts of the task begin or end with (the template), and `rendered` texts: as a policy's
    tokenizer writes the prompt, without special tokens.
    """

    def __init__(self, prompts: Sequence[Prompt], rendered: Iterable[Sequence[str]] = ()) -> None:
        self._ids = {prompt.id for prompt in prompts}
        self._by_text: dict[str, list[str]] = {}
        for prompt in prompts:
            texts = [prompt.text, *[text for role, text in prompt.messages if role == "user"][-1:]]
            columns = [prompt.columns.get(name) for name in PROMPTS]
            self._add(prompt.id, [*texts, *(value for value in columns if isinstance(value, str))])
        for written in rendered:
            for prompt, text in zip(prompts, written, strict=True):
                self._add(prompt.id, [text])
        self._add_cores(prompts)

    def _add(self, prompt_id: str, texts: Iterable[str]) -> None:
        for key in {normalized(text) for text in texts} - {""}:
            known = self._by_text.setdefault(key, [])
            if prompt_id not in known:
                known.append(prompt_id)

    def _add_cores(self, prompts: Sequence[Prompt]) -> None:
        """Add the texts without the task's template, where one belongs to prompts of one text only."""
        begin, end = template_of([prompt.text for prompt in prompts])
        if not begin and not end:
            return
        cores: dict[str, set[str]] = {}
        for prompt in prompts:
            core = normalized(prompt.text[len(begin) : len(prompt.text) - len(end)])
            cores.setdefault(core, set()).add(prompt.text)
        for prompt in prompts:
            core = normalized(prompt.text[len(begin) : len(prompt.text) - len(end)])
            if len(cores[core]) == 1:
                self._add(prompt.id, [core])

    def of_text(self, text: str) -> list[str]:
        """Return the ids of the prompts with a text, as it is or without a known instruction."""
        key = normalized(text)
        if found := self._by_text.get(key):
            return found
        for instruction in INSTRUCTIONS:
            shorter = key.removeprefix(instruction).removesuffix(instruction).strip()
            if shorter != key and (found := self._by_text.get(shorter)):
                return found
        return []

    def find(self, row: RecordedRow) -> list[str]:
        """Return the ids of the prompts that a row names; several if the task has one text more than once.

        A text that is another prompt's than the id's decides, and so does an unknown text beside an id that is a
        number: counters in two files are equal without meaning the same.
        """
        named = [prompt_id for prompt_id in row.ids if prompt_id in self._ids]
        for text in row.prompts:
            if found := self.of_text(text):
                return [named[0]] if named and named[0] in found else found
        return [prompt_id for prompt_id in named if not row.prompts or not prompt_id.isdecimal()][:1]


def common_prefix(texts: Sequence[str]) -> str:
    """Return the longest text that all begin with."""
    first, last = min(texts), max(texts)  # those that differ earliest, in the order of strings
    length = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def template_of(texts: Sequence[str]) -> tuple[str, str]:
    """Return what all texts begin with and what they end with, in whole words; nothing for fewer than two different
    texts."""
    if len(set(texts)) < 2:
        return "", ""
    begin = common_prefix(texts)
    begin = begin[: 1 + max((place for place, character in enumerate(begin) if character.isspace()), default=-1)]
    end = common_prefix([text[len(begin) :][::-1] for text in texts])
    end = end[: 1 + max((place for place, character in enumerate(end) if character.isspace()), default=-1)][::-1]
    return begin, end
