"""Prompts with a hint: the hint as a learner sees it, and how the two are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: put prompt and hint together unless a regime's setting does
FOR_CHATS = (
    "{prompt}\n\nA correct solution, for you only:\n{hint}\n\nSolve the problem in your own words. Do not copy the "
    "solution, and do not mention it."
)
FOR_TEXTS = "{prompt}\nA correct solution: {hint}\nThe same in other words:"


def with_hint(prompt: Any, hint: str, template: str | None = None) -> Any:
    """Return a prompt, a text or a conversation, put together with a hint; unchanged without one.

    `template`: with one {prompt} and one {hint}; by default one for texts, another one for conversations, whose last
    user message is the {prompt}. Neither of the two is read as a template itself.
    """
    if not hint:
        return prompt
    chosen = template or (FOR_TEXTS if isinstance(prompt, str) else FOR_CHATS)

    def filled(text: str) -> str:
        before, _, after = chosen.partition("{prompt}")
        return before.replace("{hint}", hint) + text + after.replace("{hint}", hint)

    if isinstance(prompt, str):
        return filled(prompt)
    last = max(place for place, message in enumerate(prompt) if message["role"] == "user")
    message = {**prompt[last], "content": filled(prompt[last]["content"])}
    return [*prompt[:last], message, *prompt[last + 1 :]]


def shown_hint(
    hint: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> tuple[str, tuple[int, ...]]:
    """Return a hint as it is shown, and its token ids: without the tokenizer's special tokens, which a prompt would
    have as such, and cut to `max_tokens`."""
    if not hint:
        return "", ()
    for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True):
        hint = hint.replace(token, "")
    ids = tokenizer(hint, add_special_tokens=False)["input_ids"]
    if max_tokens is not None and len(ids) > max_tokens:
        ids = ids[:max_tokens]
        hint = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return hint, tuple(ids)
