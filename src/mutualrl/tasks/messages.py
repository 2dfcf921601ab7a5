"""The one reading of a chat message: of served and recorded answers, of rollouts in files, of prompts.

A message has a role and content: a string, or a list of parts of which those with text are read. What a model thought
before its answer is in a field of its own (`reasoning_content`, `reasoning`, `thinking`), in parts of that kind, or
within the text (`<think>`). Calls of tools are read in the forms of OpenAI, Anthropic, Google and Amazon, of TRL, vLLM,
ATIF and LangChain. What is neither, such as an image, is counted and left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mutualrl.trajectory import Message, ToolCall

#: fields with what was thought before the answer, and kinds of parts
REASONING = ("reasoning_content", "reasoning", "thinking")
_BLOCKS = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
_MARKS = ("<|begin_of_solution|>", "<|end_of_solution|>")
#: names of a call's fields: its tool, its arguments, and what its result refers to
_NAMES = ("name", "function_name", "tool_name", "toolName")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
CALL_IDS = ("call_id", "tool_call_id", "tool_use_id", "toolUseId", "toolCallId", "id")
#: kinds of parts, and fields of parts, that are calls
CALL_KINDS = ("function_call", "tool_call", "tool-call", "tool_use")
_CALL_FIELDS = ("functionCall", "function_call", "toolUse")
#: reasons to end that cut a text off, in lower case; any other is an end
CUTTING = frozenset(
    (
        *("length", "max_tokens", "max_length", "max_output_tokens", "model_length", "token_limit"),
        *("abort", "aborted", "cancelled", "error", "content_filter", "incomplete"),
    )
)

#: by tool, the parameters that a call must have: a null of these is a value
Required = Mapping[str, frozenset[str]]


def read_message(value: object, required: Required | None = None) -> Message | None:
    """Return a message of `role` and `content` (`from` and `value`, `role` and `parts`); of a node of a trace, its
    message. None for anything else. `required`: as in `read_call`."""
    if not isinstance(value, Mapping):
        return None
    sampled = value.get("sampled") is True
    inner = value.get("message")
    chat: Mapping[str, object] = inner if isinstance(inner, Mapping) else value
    role = chat.get("role") or chat.get("from")
    contents = [chat[key] for key in ("content", "value", "parts") if chat.get(key) not in (None, "", [])]
    content = content_of(next(iter(contents), None), required)
    thought = next((text for key in REASONING if (text := _string(chat.get(key))).strip()), "")
    if not isinstance(role, str) or content is None:
        return None
    return Message(
        role,
        content.text,
        thought or content.reasoning,
        _once([*content.tool_calls, *_calls_of(chat, required)]),
        content.others,
        _string(chat.get("name")),
        _string(chat.get("tool_call_id")),
        sampled,
    )


def _once(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Return calls, of which some stand in the content and in a field of their own, once by their ids."""
    named = {call.call_id: call for call in reversed(calls) if call.call_id}
    return tuple(call for call in calls if not call.call_id or named[call.call_id] is call)


def _calls_of(message: Mapping[str, object], required: Required | None) -> tuple[ToolCall, ...]:
    """Return the calls of a message: of `tool_calls`, or of the older `function_call`; each of them, and the whole
    list, may be JSON text."""
    calls = from_text(message.get("tool_calls") or message.get("function_call"))
    if isinstance(calls, Mapping):
        calls = [calls]
    elif not isinstance(calls, list | tuple):
        calls = [calls] if calls else []
    return tuple(read_call(call, required) for call in calls if call is not None)


def from_text(value: object) -> object:
    """Return what a JSON text of an object or a list holds, also one that was encoded twice; any other value as it
    is."""
    parsed = value
    for _ in range(2):
        if not isinstance(parsed, str):
            break
        try:
            parsed = json.loads(parsed)
        except (ValueError, RecursionError):
            break
    return parsed if isinstance(parsed, Mapping | list) else value


def read_call(value: object, required: Required | None = None) -> ToolCall:
    """Return a call: of `function` with `name` and `arguments`, or of these alone; arguments may be JSON text, of which
    an empty one has none.

    `required`: nulls of arguments that are an object are no arguments, but for the parameters that their tool requires:
    a column of structs gives each call the arguments of all tools. None: they are values, as in a JSON text.
    """
    value = from_text(value)
    if not isinstance(value, Mapping):
        return ToolCall("", str(value))
    call: Mapping[str, object] = value
    for key in ("function", *_CALL_FIELDS):
        if isinstance(inner := value.get(key), Mapping):
            call = {**{key: value[key] for key in CALL_IDS if key in value}, **inner}
    call_id = next((text for key in CALL_IDS if (text := _string(call.get(key)))), "")
    name = next((text for key in _NAMES if (text := _string(call.get(key)))), "")
    arguments = next((call[key] for key in _ARGUMENTS if call.get(key) is not None), None)
    if isinstance(arguments, Mapping) and required is not None:
        kept = required.get(name, frozenset())
        try:
            arguments = {key: _present(each) for key, each in arguments.items() if each is not None or key in kept}
        except RecursionError:
            arguments = "nested too deeply"
    arguments = from_text(arguments)
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        arguments = {}
    if not isinstance(arguments, Mapping | str):
        arguments = json.dumps(arguments, default=str)
    return ToolCall(name, arguments, call_id)


def _present(value: object) -> object:
    """Return a value without the nulls of its structs."""
    if isinstance(value, Mapping):
        return {key: _present(each) for key, each in value.items() if each is not None}
    return [_present(each) for each in value] if isinstance(value, list | tuple) else value


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def content_of(value: object, required: Required | None = None) -> Message | None:
    """Return the text, the reasoning and the calls of a message's content, with an empty role; None if it is neither a
    string nor a list of parts."""
    if value is None or isinstance(value, str):
        return Message("", value or "")
    if not isinstance(value, list | tuple):
        return None
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    others = 0
    for each in value:
        thought = each.get("reasoningContent") if isinstance(each, Mapping) else None
        part = (
            {"type": REASONING[0], **_mapping(thought.get("reasoningText"))} if isinstance(thought, Mapping) else each
        )
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        text = _text_of(part)
        if kind in CALL_KINDS or (
            isinstance(part, Mapping) and any(isinstance(part.get(key), Mapping) for key in _CALL_FIELDS)
        ):
            calls.append(read_call(part, required))
        elif text is None:
            others += 1
        elif kind in REASONING or (isinstance(part, Mapping) and part.get("thought") is True):
            thoughts.append(text)
        else:
            texts.append(text)
    return Message("", "".join(texts), "".join(thoughts), tuple(calls), others)


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


#: tokens that end a response, written as text by some exports: the learner ends a text with its own
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "</s>", "<|eom_id|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
)


def without_end(text: str) -> str:
    """Return a text without end tokens at its end, and without whitespace after them."""
    end = len(text)
    while True:
        stop = end
        while stop and text[stop - 1].isspace():
            stop -= 1
        mark = next((mark for mark in _ENDS if text.endswith(mark, 0, stop)), None)
        if mark is None:
            return text[:end]
        end = stop - len(mark)
