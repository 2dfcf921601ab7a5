"""Rendering of prompts for a model: as plain text, or as a user turn of its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mutualrl.errors import ModelError
from mutualrl.process.limits import CpuTimeError, bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mutualrl.records import Prompt

#: limits of a model's chat template for one prompt
TEMPLATE_SECONDS = 10.0
TEMPLATE_BYTES = 2 * 2**30
TEMPLATE_CHARACTERS = 10_000_000

Content = str | list[dict[str, str]]
#: arguments of a chat template: TRL's `chat_template_kwargs`
Template = Mapping[str, Any]


def as_prompt(content: Content, tokenizer: PreTrainedTokenizerBase | None) -> Content:
    """Return the prompt in TRL's form: a conversation unchanged; a string as one user message if the tokenizer has a
    chat template, else unchanged, as without a tokenizer. Raises ModelError for a conversation if the tokenizer has no
    chat template."""
    if tokenizer is None:
        return content
    if isinstance(content, str):
        return [{"role": "user", "content": content}] if tokenizer.chat_template else content
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which conversational prompts "
            "need; set tokenizer.chat_template, or use plain-text prompts"
        )
    return content


def prompt_ids(
    texts: Sequence[Content], tokenizer: PreTrainedTokenizerBase, template: Template | None = None
) -> list[list[int]]:
    """Return the token ids of prompts exactly as in TRL: template and generation prompt, or plain text.

    `texts`: strings, or conversations. `template`: arguments of the chat template (TRL's `chat_template_kwargs`).
    Raises ModelError when the chat template cannot be rendered, or is missing but needed.
    """
    if not texts:
        return []
    prompts = [as_prompt(text, tokenizer) for text in texts]
    if tokenizer.chat_template:
        _rehearse(prompts, tokenizer, template or {})
        ids = tokenizer.apply_chat_template(
            conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **(template or {})
        )["input_ids"]
    else:
        ids = tokenizer(text=prompts)["input_ids"]
    return [list(row) for row in ids]


def within_limit(
    prompts: Sequence[Prompt], readers: Sequence[tuple[PreTrainedTokenizerBase, Template]], limit: int
) -> list[Prompt]:
    """Return the prompts of at most `limit` tokens under every policy's tokenizer and chat template arguments.

    A prompt too long for any policy is dropped for all, so that every policy sees the identical batch
    (paper, Section "Implementation details").
    """
    fitting = set(range(len(prompts)))
    for tokenizer, template in readers:
        contents = [prompt.content for prompt in prompts]
        for index, ids in enumerate(prompt_ids(contents, tokenizer, template)):
            if len(ids) > limit:
                fitting.discard(index)
    return [prompts[i] for i in sorted(fitting)]


def _rehearse(prompts: Sequence[Content], tokenizer: PreTrainedTokenizerBase, arguments: Template) -> None:
    """Render each prompt once under limits. A chat template is a program from the model's files: it may loop, allocate
    without bound, or fail. Raises ModelError if it does."""
    for prompt in prompts:
        try:
            with bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES):
                text = tokenizer.apply_chat_template(
                    conversation=prompt, add_generation_prompt=True, tokenize=False, **arguments
                )
            problem = f"produced {len(text):,} characters" if len(text) > TEMPLATE_CHARACTERS else None
        except CpuTimeError:
            problem = f"exceeded {TEMPLATE_SECONDS:g} s of CPU time"
        except MemoryError:
            problem = f"needed over {TEMPLATE_BYTES:,} bytes"
        except Exception as error:  # noqa: BLE001  (a third-party template may raise anything)
            problem = f"failed: {type(error).__name__}: {error}"
        if problem is not None:
            raise ModelError(f"the chat template of {tokenizer.name_or_path!r} {problem} on the prompt {prompt!r:.80}")
