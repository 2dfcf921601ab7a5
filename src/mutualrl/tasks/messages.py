"""The one reading of a chat message: of served and recorded answers, of rollouts in files, of prompts.

A message has a role and content: a string, or a list of parts of which those with text are read. What a model thought
before its answer is in a field of its own (`reasoning_content`, `reasoning`, `thinking`), in parts of that kind, or
within the text (`<think>`). Calls of tools are read in the forms of OpenAI, TRL and vLLM. What is neither, such as an
image, is counted and left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

#: fields with what was thought before the answer, and kinds of parts
REASONING = ("reasoning_content", "reasoning", "thinking")
_BLOCKS = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
_MARKS = ("<|begin_of_solution|>", "<|end_of_solution|>")
#: reasons to end that cut a text off, in lower case; any other is an end
CUTTING = frozenset(
    (
        *("length", "max_tokens", "max_length", "max_output_tokens", "model_length", "token_limit"),
        *("abort", "aborted", "cancelled", "error", "content_filter", "incomplete"),
    )
)


class ToolCall(NamedTuple):
    """Call of a tool. `arguments`: by name, each with its type; a text that is no JSON object stays as it is.
    `call_id`: what its result refers to, where the format has it."""

    name: str
    arguments: Mapping[str, object] | str
    call_id: str = ""


class Message(NamedTuple):
    """Message as it is read. `others`: number of its parts without text, which are left out. `name`: of a result, the
    tool; `call_id`: the call that it answers, where the format says so. `sampled`: the policy sampled it."""

    role: str
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    others: int = 0
    name: str = ""
    call_id: str = ""
    sampled: bool = False

    @property
    def with_reasoning(self) -> str:
        """Return the text after its reasoning in a block, as models write it."""
        thought = self.reasoning.strip()
        return f"<think>\n{thought}\n</think>\n\n{self.text}" if thought else self.text


def read_message(value: object) -> Message | None:
    """Return a message of `role` and `content`, or of `from` and `value`; of a node of a trace, its message. None for
    anything else."""
    if not isinstance(value, Mapping):
        return None
    sampled = value.get("sampled") is True
    inner = value.get("message")
    chat: Mapping[str, object] = inner if isinstance(inner, Mapping) else value
    role = chat.get("role", chat.get("from"))
    content = content_of(chat.get("content", chat.get("value")))
    thought = next((text for key in REASONING if (text := _string(chat.get(key))).strip()), "")
    if not isinstance(role, str) or content is None:
        return None
    return Message(
        role,
        content.text,
        thought or content.reasoning,
        _calls_of(chat),
        content.others,
        _string(chat.get("name")),
        _string(chat.get("tool_call_id")),
        sampled,
    )


def _calls_of(message: Mapping[str, object]) -> tuple[ToolCall, ...]:
    """Return the calls of a message: of `tool_calls`, or of the older `function_call`."""
    calls = message.get("tool_calls") or message.get("function_call")
    if isinstance(calls, Mapping):
        calls = [calls]
    return tuple(read_call(call) for call in calls) if isinstance(calls, list | tuple) else ()


def read_call(value: object) -> ToolCall:
    """Return a call: of `function` with `name` and `arguments`, or of these alone; arguments may be JSON text."""
    if not isinstance(value, Mapping):
        return ToolCall("", str(value))
    call_id = _string(value.get("id", value.get("tool_call_id")))
    function = value.get("function")
    call: Mapping[str, object] = function if isinstance(function, Mapping) else value
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, Mapping) else arguments
    if arguments is None:
        arguments = {}
    name = _string(call.get("name", call.get("function_name")))
    return ToolCall(name, arguments if isinstance(arguments, Mapping | str) else json.dumps(arguments), call_id)


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def content_of(value: object) -> Message | None:
    """Return the text and the reasoning of a message's content, with an empty role; None if it is neither a string nor
    a list of parts."""
    if value is None or isinstance(value, str):
        return Message("", value or "")
    if not isinstance(value, list | tuple):
        return None
    texts: list[str] = []
    thoughts: list[str] = []
    others = 0
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = _text_of(part)
        if text is None:
            others += 1
        elif kind in REASONING:
            thoughts.append(text)
        else:
            texts.append(text)
    return Message("", "".join(texts), "".join(thoughts), others=others)


def _text_of(part: object) -> str | None:
    """Return the text of a part: of a string, of its field `text`, or of what it thought; None without one."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    for key in ("text", *REASONING):
        if isinstance(part.get(key), str):
            return str(part[key])
        if isinstance(part.get(key), list | tuple):  # parts within a part
            nested = content_of(part[key])
            return None if nested is None else nested.text
    return None


def is_cut_off(finish_reason: object) -> bool:
    """Return whether a reason to end says that the text is not complete."""
    return isinstance(finish_reason, str) and finish_reason.lower() in CUTTING


def opens_reasoning(text: str) -> bool:
    """Return whether a block of reasoning begins and does not end: the text was cut off."""
    return any(begin in text and end not in text[text.rfind(begin) :] for begin, end in _BLOCKS)


def ends_in_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the mark that opens a block of reasoning, as generation prompts do."""
    return any(prompt.rstrip().endswith(begin) for begin, _ in _BLOCKS)


def continued(text: str, *, ended: bool = True) -> str | None:
    """Return a text as it follows a prompt that has opened a block of reasoning (`<think>`): without the opening mark,
    which would open it twice. None for a text that `ended` without the end of a block: it would be learnt as
    reasoning."""
    head = text.lstrip()
    for begin, _ in _BLOCKS:
        if head.startswith(begin):
            text = head.removeprefix(begin).lstrip("\n")
    return None if ended and not any(end in text for _, end in _BLOCKS) else text


def without_reasoning(text: str) -> str:
    """Return what follows the last block of reasoning, without the marks of the solution. The block may begin in the
    prompt, so that only its end is here."""
    for _, end in _BLOCKS:
        text = text.rpartition(end)[2]
    for mark in _MARKS:
        text = text.replace(mark, "")
    return text.strip("\n")
