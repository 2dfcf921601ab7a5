"""Values of a file's list of messages, in the notations of vendors and formats, as messages (see `run_reader`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mutualrl.tasks.messages import CALL_IDS, CALL_KINDS, Required, content_of, from_text, read_call, read_message
from mutualrl.trajectory import Message

#: roles of the model's messages, of the user's, of the system's, and of results, in the formats of files
ASSISTANT = frozenset(("assistant", "gpt", "model", "chatgpt", "bot", "agent", "ai"))
USER = frozenset(("user", "human"))
_SYSTEM = frozenset(("system", "developer"))
_RESULT = frozenset(("tool", "function", "observation", "ipython", "tool_response"))
#: messages of LangChain have their role as `type`
_TYPED = frozenset(("ai", "human", "system", "tool"))
#: parts that are results, by their type or by the field that holds them
RESULT_KINDS = ("tool_result", "tool-result", "function_call_output")
_RESULT_FIELDS = ("functionResponse", "function_response", "toolResult")
_RESULT_NAMES = ("name", "tool_name", "toolName")
_CONTENTS = ("content", "output", "response", "result")
#: what results are wrapped in where a template has no role for them
_TEXT_RESULT = ("<tool_response>", "</tool_response>")
#: keys of a part of a content, beside its `type`
_PART_KEYS = frozenset(("text", "json", "image", "document", "video", "cachePoint"))


def last_branch(nodes: Sequence[object]) -> tuple[Sequence[object], int, str]:
    """Return the nodes of a trace on the path to the last one, by their `parent`, an index; the number of other ends;
    and what is wrong with the path (empty: nothing). Other messages are one branch."""
    parents: list[int | None] = []
    for node in nodes:
        if not isinstance(node, Mapping) or not isinstance(node.get("message"), Mapping) or "parent" not in node:
            return nodes, 0, ""
        parent = node["parent"]
        if isinstance(parent, float) and parent.is_integer():
            parent = int(parent)
        if parent is not None and (isinstance(parent, bool) or not isinstance(parent, int)):
            return nodes, 0, ""
        parents.append(parent)
    path: dict[int, None] = {}
    place: int | None = len(nodes) - 1 if nodes else None
    while place is not None and 0 <= place < len(nodes) and place not in path:
        path[place] = None
        place = parents[place]
    ends = set(range(len(nodes))) - {parent for parent in parents if parent is not None}
    problem = "" if place is None else "a node whose parent is no earlier one"
    return [nodes[place] for place in reversed(path)], max(len(ends) - 1, 0), problem


def messages_of(value: object, required: Required) -> list[Message] | None:
    """Return the messages in a value of a file's list: a message, of which parts may be results; an item of Responses;
    or a step of ATIF, with its results. None for anything else. `required`: as in `read_call`."""
    if not isinstance(value, Mapping):
        return None
    if value.get("role") is None and value.get("from") is None and not isinstance(value.get("message"), Mapping):
        if str(value.get("source")) in ("user", "agent", "system"):
            return _of_step(value, required)
        return None if value.get("type") is None else _of_item(value, str(value["type"]), required)
    inner = value.get("message")
    chat: Mapping[str, object] = inner if isinstance(inner, Mapping) else value
    parts = chat.get("content") or chat.get("parts")
    if isinstance(parts, list | tuple) and any(_is_result(part) for part in parts):
        key = "content" if parts is chat.get("content") else "parts"
        others = [part for part in parts if not _is_result(part)]
        rest = messages_of({**chat, key: others}, required) if others else []
        return None if rest is None else [*(_result_of(part) for part in parts if _is_result(part)), *rest]
    role = chat.get("role") or chat.get("from")
    if not isinstance(role, str):
        return None
    if role in _RESULT:
        result = _result_of(chat)
        several = unwrapped(result.text)
        return [result] if len(several) < 2 else [result._replace(text=each, call_id="") for each in several]
    if role == "function_call":  # of ShareGPT: a call, or a list of calls
        calls = from_text(chat.get("value", chat.get("content")))
        listed = calls if isinstance(calls, list | tuple) else [calls]
        return [Message("assistant", "", tool_calls=tuple(read_call(call, required) for call in listed))]
    message = read_message(value, required)
    if message is None:
        return None
    role = "assistant" if message.role in ASSISTANT else "user" if message.role in USER else message.role
    unread = chat.get("toolInvocations")  # of messages of the AI SDK's pages: calls with their results
    lost = len(unread) if isinstance(unread, list | tuple) else 0
    return [message._replace(role="system" if role in _SYSTEM else role, others=message.others + lost)]


def _of_item(item: Mapping[str, object], kind: str, required: Required) -> list[Message] | None:
    """Return an item of Responses, or a message of LangChain, by its type. One of another kind, such as a call of a
    vendor's own tool, is a part that is no text."""
    if kind in CALL_KINDS:
        return [Message("assistant", "", tool_calls=(read_call(item, required),))]
    if kind in RESULT_KINDS:
        return [_result_of(item)]
    if kind == "reasoning":
        thought = content_of(item.get("summary") or item.get("content"))
        return None if thought is None else [Message("assistant", "", thought.text + thought.reasoning)]
    if kind in _TYPED:
        data = item.get("data")  # of messages_to_dict
        return messages_of({**(data if isinstance(data, Mapping) else item), "role": kind}, required)
    return [Message("assistant", "", others=1)]


def _of_step(step: Mapping[str, object], required: Required) -> list[Message] | None:
    """Return a step of ATIF: the message of its source with its calls, then their results."""
    role = "assistant" if step["source"] == "agent" else str(step["source"])
    keys = {"content": "message", "tool_calls": "tool_calls", "reasoning_content": "reasoning_content"}
    said = read_message({"role": role, **{key: step.get(name) for key, name in keys.items()}}, required)
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, Mapping) else None
    found = [each for each in results if isinstance(each, Mapping)] if isinstance(results, list | tuple) else []
    if said is None:
        return None
    calls = ({"content": each.get("content"), "tool_call_id": each.get("source_call_id")} for each in found)
    return [said, *map(_result_of, calls)]


def _is_result(part: object) -> bool:
    if not isinstance(part, Mapping):
        return False
    return str(part.get("type")) in RESULT_KINDS or any(isinstance(part.get(key), Mapping) for key in _RESULT_FIELDS)


def _result_of(value: Mapping[str, object]) -> Message:
    """Return a result: a message of a tool, a part, or an item."""
    inner = next((value[key] for key in _RESULT_FIELDS if isinstance(value.get(key), Mapping)), None)
    result: Mapping[str, object] = inner if isinstance(inner, Mapping) else value
    content = next((result[key] for key in (*_CONTENTS, "value") if result.get(key) is not None), None)
    read = content_of(_content_of_result(content))
    text, others = ("", 1) if read is None else (read.text, read.others + len(read.tool_calls))
    name = next((name for key in _RESULT_NAMES if isinstance(name := result.get(key), str)), "")
    # an id of its own is no reference, but in Google's functionResponse
    keys = [key for key in CALL_IDS if key != "id" or inner is not None]
    key = next((reference for name in keys if isinstance(reference := result.get(name), str)), "")
    wrapped = unwrapped(text)
    return Message("tool", wrapped[0] if len(wrapped) == 1 else text, others=others, name=name, call_id=key)


def _content_of_result(content: object) -> object:
    """Return the content of a result as text, or as parts: what is neither is JSON. A wrapper of Google's libraries
    (`output` or `result`) or of the AI SDK (`type` and `value`) is no part of it."""
    unpacked = False
    if isinstance(content, Mapping):
        given = {key: each for key, each in content.items() if each is not None}  # a column of structs has all keys
        if given.keys() in ({"output"}, {"result"}):
            content, unpacked = next(iter(given.values())), True
        elif given.keys() == {"type", "value"}:
            content, unpacked = given["value"], given["type"] != "content"
        else:
            content = given
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and not unpacked and all(_is_part(each) for each in content):
        return [_with_json(each) for each in content]
    return _as_text(content)


def _is_part(value: object) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("type"), str) or any(value.get(key) is not None for key in _PART_KEYS)


def _with_json(part: object) -> object:
    """Return a part of Amazon's with JSON as one with text; any other as it is."""
    if isinstance(part, Mapping) and part.get("text") is None and part.get("json") is not None:
        return {"text": _as_text(part["json"])}
    return part


def _as_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def unwrapped(text: str) -> list[str]:
    """Return the results that a text consists of, as templates without a role for them write it; none of another."""
    begin, end = _TEXT_RESULT
    *blocks, rest = text.strip().split(end)
    blocks = [block.lstrip() for block in blocks]
    if rest or not all(block.startswith(begin) for block in blocks):
        return []
    return [block.removeprefix(begin).removeprefix("\n").removesuffix("\n") for block in blocks]
