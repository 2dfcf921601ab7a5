"""Prompts with a hint: how the two are put together."""

from __future__ import annotations

from typing import Any

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
