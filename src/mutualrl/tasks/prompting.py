"""Rendering of prompts for a model: as plain text, or as a user's turn of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from mutualrl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Content = str | list[dict[str, str]]


def as_prompt(content: Content, tokenizer: PreTrainedTokenizerBase) -> Content:
    """Return the prompt in TRL's form: a conversation as it is; a text as one user message when the tokenizer has a
    chat template, else as it is. Raises ModelError for a conversation and a tokenizer without a chat template."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}] if tokenizer.chat_template else content
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which conversational prompts "
            "need; give it one (tokenizer.chat_template), or prompts that are plain text"
        )
    return content


def prompt_ids(
    texts: Sequence[Content], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return token ids of prompts exactly as TRL makes them: template and generation prompt, or plain text.

    `texts`: texts, or conversations. `template`: arguments of the chat template (TRL's `chat_template_kwargs`). Raises
    ModelError when the chat template cannot be carried out, or is missing where it is needed.
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
