"""Prompts with a hint: what a success gives as one, the hint as a learner sees it, and how the two are put together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mutualrl.tasks.base import CHARACTERS_PER_TOKEN
from mutualrl.tasks.boxed import final_answer
from mutualrl.tasks.trajectories import plan, transcript
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: put prompt and hint together unless a regime's setting does
FOR_CHATS = (
    "{prompt}\n\nA correct solution, for you only:\n{hint}\n\nSolve the problem in your own words. Do not copy the "
    "solution, and do not mention it."
)
FOR_AGENTS = (
    "{prompt}\n\nWhat worked before, for you only:\n{hint}\n\nAct yourself, with your own tools. Do not mention this."
)
FOR_TEXTS = "{prompt}\nA correct solution: {hint}\nThe same in other words:"


Shorten = Callable[[str], str]


def _plan(success: Trajectory, _: Shorten) -> str:
    return plan(success)


def _plan_and_answer(success: Trajectory, _: Shorten) -> str:
    return "" if success.is_text else plan(success, answer=True)


def _answer(success: Trajectory, _: Shorten) -> str:
    return final_answer(success.answer)


def _text_or_plan(success: Trajectory, _: Shorten) -> str:
    return success.text if success.is_text else plan(success)


@dataclass(frozen=True)
class HintKind:
    """What a success gives as a hint: a value of the setting `hint`."""

    text: Callable[[Trajectory, Shorten], str] = transcript
    """The hint of a success; results of tools are cut by the second argument."""
    is_whole: bool = False
    """Whether it is all of the success, whose NLL as a completion of the prompt is logged."""
    shares: tuple[float, ...] = (1.0,)
    """Shares of its words that are shown, one after another, until an answer is confirmed."""
    is_of_calls: bool = False
    """Whether only runs with tools give one."""
    is_shuffled: bool = False
    """Whether a prompt is shown what another one's success gives: a control."""
    is_shown: bool = True
    """Whether there is a hint; without, a control, answers are further rollouts of the prompt's group."""


#: the shares of `hint: least` are as many as there are phases of a round
KINDS = {
    "solution": HintKind(is_whole=True),
    "least": HintKind(is_whole=True, shares=(0.25, 0.5, 0.75, 1.0)),
    "answer": HintKind(_answer),
    "plan": HintKind(_plan, is_of_calls=True),
    "plan_and_answer": HintKind(_plan_and_answer, is_of_calls=True),
    "shuffled": HintKind(_text_or_plan, is_shuffled=True),
    "none": HintKind(is_shown=False),
}


def first_words(text: str, share: float) -> str:
    """Return the first words of a text, this share of them, rounded up; all of it, as it is, with 1."""
    words = list(re.finditer(r"\S+", text))
    kept = math.ceil(share * len(words) - 1e-9)
    return text if kept >= len(words) else text[: words[kept - 1].end()] if kept else ""


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
    users = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    last = users[-1] if users else len(prompt) - 1
    content = prompt[last]["content"]
    if isinstance(content, str):
        shown: Any = filled(content)
    else:  # blocks of text and images
        before, after = filled("{prompt}").split("{prompt}", 1)
        shown = [{"type": "text", "text": before}, *content, {"type": "text", "text": after}]
        shown = [block for block in shown if block.get("text") != ""]
    return [*prompt[:last], {**prompt[last], "content": shown}, *prompt[last + 1 :]]


def shown_hint(hint: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[str, tuple[int, ...]]:
    """Return a hint as it is shown, and its token ids: cut to `max_tokens`, and without the tokenizer's special tokens,
    with which a peer's text could end the learner's prompt and begin another turn."""
    if not hint:
        return "", ()
    hint = _without_special_tokens(hint[: CHARACTERS_PER_TOKEN * max_tokens], tokenizer)
    return first_tokens(hint, tokenizer, max_tokens)


def first_tokens(text: str, tokenizer: PreTrainedTokenizerBase, count: int) -> tuple[str, tuple[int, ...]]:
    """Return a text, cut to its first `count` tokens, and these."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) > count:
        ids = ids[:count]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text, tuple(ids)


def _without_special_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text without special tokens, also those that only appear once others are removed."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    before = None
    while before != text:
        before = text
        for token in sorted(special, key=len, reverse=True):
            text = text.replace(token, "")
    return text
