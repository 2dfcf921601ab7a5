"""How a task's prompt reaches a model: as plain text, or as a user's turn of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from mutualrl.errors import ModelError


def as_prompt(text: str, tokenizer: Any) -> str | list[dict[str, str]]:
    """The prompt in TRL's form: one user message when the tokenizer has a chat template, else the text."""
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def prompt_ids(texts: Sequence[str], tokenizer: Any, template: Mapping[str, Any] | None = None) -> list[list[int]]:
    """Token ids of prompts exactly as TRL makes them: template and generation prompt, or plain text.

    `template`: arguments of the chat template (TRL's `chat_template_kwargs`). Raises ModelError when the chat template
    cannot be carried out.
    """
    if not texts:
        return []
    prompts = [as_prompt(text, tokenizer) for text in texts]
    if tokenizer.chat_template:
        try:
            ids = tokenizer.apply_chat_template(
                conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **(template or {})
            )["input_ids"]
        except TemplateError as error:
            raise ModelError(f"the chat template of {tokenizer.name_or_path!r} failed on a prompt: {error}") from error
    else:
        ids = tokenizer(text=prompts)["input_ids"]
    return [list(row) for row in ids]
