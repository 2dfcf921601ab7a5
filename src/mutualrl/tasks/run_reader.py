"""The one reader of agents' runs in files: any notation becomes the same `Trajectory`, or one with its problem.

Read are chats of OpenAI (also `function_call` and the items of Responses), Anthropic (`tool_use`, `tool_result`),
Google (`functionCall`, `functionResponse`), Amazon (`toolUse`, `toolResult`), LangChain and the AI SDK; `from` and
`value` of ShareGPT and LLaMA-Factory; nodes of a trace of verifiers; steps of ATIF; and calls that Hermes, Mistral and
Llama write as text. Then the shape is checked, since a learner would be taught what it has: each result belongs to a
call before it and stands where a template is read as its answer, each call has a tool, no turn is empty, nothing
stands twice, and no part is left out.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from mutualrl.records import Message, ToolCall, Trajectory
from mutualrl.tasks.messages import CALL_IDS, CALL_KINDS, Required, content_of, from_text, read_call, read_message

#: roles of the model's messages, of the user's, of the system's, and of results, in the formats of files
ASSISTANT = frozenset(("assistant", "gpt", "model", "chatgpt", "bot", "agent", "ai"))
USER = frozenset(("user", "human"))
_SYSTEM = frozenset(("system", "developer"))
_RESULT = frozenset(("tool", "function", "observation", "ipython", "tool_response"))
#: messages of LangChain have their role as `type`
_TYPED = frozenset(("ai", "human", "system", "tool"))
#: parts that are results, by their type or by the field that holds them
_RESULT_KINDS = ("tool_result", "tool-result", "function_call_output")
_RESULT_FIELDS = ("functionResponse", "function_response", "toolResult")
_RESULT_NAMES = ("name", "tool_name", "toolName")
_CONTENTS = ("content", "output", "response", "result")

#: what begins and ends a call that is written as text, its JSON between them: of Hermes and Qwen, of Llama's custom
#: tools (with the name before it), of Mistral, and of Llama's built-in tools
_TEXT_CALLS = (
    ("<tool_call>", "</tool_call>"),
    ("<function=", "</function>"),
    ("[TOOL_CALLS]", ""),
    ("<|python_tag|>", ""),
)
#: what begins a call as text in these and other notations
_CALL_MARKS = (
    *("<tool_call>", "<function=", "<function_call>", "<functioncall>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<|tool_call|>", "<|tool_call>", "<|action_start|>", "<invoke name=", "<\uff5ctool\u2581call"),
)
_TEXT_RESULT = ("<tool_response>", "</tool_response>")
_DECODER = json.JSONDecoder()
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


#: columns that hold a conversation, in order of preference
CONVERSATIONS = ("conversations", "messages", "nodes", "steps")
#: columns that tell the steps of a run in ATIF from steps of another kind
_ATIF = ("schema_version", "agent")


class _NoRun(Exception):  # noqa: N818  (a verdict on a file's run, kept as its problem)
    """What keeps messages from being a run."""


def read_trajectory(values: object, tools: object = None) -> Trajectory | None:
    """Return the conversation of a row; None if its value is no list of messages. `values`: the list, or its JSON text.
    `tools`: the schemas of the row's tools, if it has any (a list, or its JSON text)."""
    values = from_text(values)
    if not isinstance(values, list | tuple):
        return None
    required = _required(tools)
    path, branches = _last_branch(values)
    messages: list[Message] = []
    for value in path:
        read = _messages_of(value, required)
        if read is None:
            return None
        messages += read
    try:
        messages = _joined(messages)
        turns = sum(message.role == "assistant" for message in messages)
        if turns > 1 or any(message.tool_calls or message.role == "tool" for message in messages):
            return Trajectory(tuple(_checked(messages, frozenset(required))), branches)
        problem = next(filter(None, map(_text_problem, messages)), "")
        return Trajectory(tuple(messages), branches, problem)
    except _NoRun as problem:
        return Trajectory(tuple(messages), branches, str(problem))


def is_conversation(column: str, columns: Collection[str]) -> bool:
    """Return whether a column of a file holds conversations: `steps` do in a run of ATIF."""
    named = column in CONVERSATIONS and column in columns
    return named and (column != "steps" or any(name in columns for name in _ATIF))


def trajectory_of(row: Mapping[str, object]) -> Trajectory | None:
    """Return the conversation of a row, from the first column that holds one; None if none does."""
    column = next((name for name in CONVERSATIONS if is_conversation(name, row) and row[name] is not None), None)
    return None if column is None else read_trajectory(row[column], tools_of(row))


def tools_of(row: Mapping[str, object]) -> object:
    """Return the schemas of a row's tools: its `tools`, or the `tool_definitions` of the agent of ATIF."""
    agent = row.get("agent")
    return row.get("tools") or (agent.get("tool_definitions") if isinstance(agent, Mapping) else None)


def _required(tools: object) -> dict[str, frozenset[str]]:
    """Return the names of tools, each with the parameters that a call must have."""
    required = {}
    listed = from_text(tools)
    for each in listed if isinstance(listed, list | tuple) else ():
        tool = from_text(each)
        schema = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(schema, Mapping) and isinstance(name := schema.get("name"), str):
            parameters = from_text(schema.get("parameters", schema.get("input_schema")))
            needed = parameters.get("required") if isinstance(parameters, Mapping) else None
            required[name] = frozenset(map(str, needed if isinstance(needed, list | tuple) else ()))
    return required


# ---- one value of a file's list


def _last_branch(nodes: Sequence[object]) -> tuple[Sequence[object], int]:
    """Return the nodes of a trace on the path to the last one, by their `parent`, an index; and the number of other
    ends. Other messages are one branch."""
    parents: list[int | None] = []
    for node in nodes:
        if not isinstance(node, Mapping) or not isinstance(node.get("message"), Mapping) or "parent" not in node:
            return nodes, 0
        parent = node["parent"]
        if parent is not None and (isinstance(parent, bool) or not isinstance(parent, int)):
            return nodes, 0
        parents.append(parent)
    path: dict[int, None] = {}
    place: int | None = len(nodes) - 1 if nodes else None
    while place is not None and 0 <= place < len(nodes) and place not in path:
        path[place] = None
        place = parents[place]
    ends = set(range(len(nodes))) - {parent for parent in parents if parent is not None}
    return [nodes[place] for place in reversed(path)], max(len(ends) - 1, 0)


def _messages_of(value: object, required: Required) -> list[Message] | None:
    """Return the messages in a value of a file's list: a message, of which parts may be results; an item of Responses;
    or a step of ATIF, with its results. None for anything else."""
    if not isinstance(value, Mapping):
        return None
    if "role" not in value and "from" not in value and not isinstance(value.get("message"), Mapping):
        kind = str(value.get("type"))
        if str(value.get("source")) in ("user", "agent", "system"):
            return _of_step(value, required)
        if kind in CALL_KINDS:
            return [Message("assistant", "", tool_calls=(read_call(value, required),))]
        if kind in _RESULT_KINDS:
            return [_result_of(value)]
        if kind == "reasoning":
            thought = content_of(value.get("summary") or value.get("content"))
            return None if thought is None else [Message("assistant", "", thought.text + thought.reasoning)]
        if kind in _TYPED:
            value = {**value, "role": kind}
    inner = value.get("message")
    chat: Mapping[str, object] = inner if isinstance(inner, Mapping) else value
    parts = chat.get("content", chat.get("parts"))
    results = [_result_of(part) for part in parts if _is_result(part)] if isinstance(parts, list | tuple) else []
    if results and isinstance(parts, list | tuple):
        key = "content" if "content" in chat else "parts"
        others = [part for part in parts if not _is_result(part)]
        rest = _messages_of({**chat, key: others}, required) if others else []
        return None if rest is None else [*results, *rest]
    role = chat.get("role") or chat.get("from")
    if not isinstance(role, str):
        return None
    if role in _RESULT:
        return [_result_of(chat)]
    if role == "function_call":  # of ShareGPT: a call, or a list of calls
        text = chat.get("value", chat.get("content"))
        calls = from_text(text)
        listed = calls if isinstance(calls, list | tuple) else [calls]
        return [Message("assistant", "", tool_calls=tuple(read_call(call, required) for call in listed))]
    message = read_message(value, required)
    if message is None:
        return None
    role = "assistant" if message.role in ASSISTANT else "user" if message.role in USER else message.role
    return [message._replace(role="system" if role in _SYSTEM else role)]


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
    return str(part.get("type")) in _RESULT_KINDS or any(isinstance(part.get(key), Mapping) for key in _RESULT_FIELDS)


def _result_of(value: Mapping[str, object]) -> Message:
    """Return a result: a message of a tool, a part, or an item. A content that is no text is JSON."""
    inner = next((value[key] for key in _RESULT_FIELDS if isinstance(value.get(key), Mapping)), value)
    result: Mapping[str, object] = inner if isinstance(inner, Mapping) else value
    content = next((result[key] for key in (*_CONTENTS, "value") if result.get(key) is not None), None)
    if isinstance(content, Mapping) and content.keys() in ({"output"}, {"result"}):  # as Google's libraries wrap it
        content = next(iter(content.values()))
    if isinstance(content, Mapping) and content.keys() == {"type", "value"}:  # of the AI SDK
        content = content["value"]
    if isinstance(content, list | tuple):
        content = [
            {"text": _as_text(part["json"])} if isinstance(part, Mapping) and "json" in part else part
            for part in content
        ]
    read = content_of(content if isinstance(content, str | list | tuple) or content is None else _as_text(content))
    text, others = ("", 1) if read is None else (read.text, read.others + len(read.tool_calls))
    name = next((name for key in _RESULT_NAMES if isinstance(name := result.get(key), str)), "")
    key = next((key for name in CALL_IDS if name != "id" and isinstance(key := result.get(name), str)), "")
    wrapped = _text_results(text)
    return Message("tool", wrapped[0] if len(wrapped) == 1 else text, others=others, name=name, call_id=key)


def _as_text(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


# ---- the shape of a whole run


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which a turn of the model is one: a call that was written as text is a call, results in a
    user's message are results, and what was written as several messages is one. Raises _NoRun."""
    joined: list[Message] = []
    for read in messages:
        message = _with_calls(read) if read.role == "assistant" else read
        last = joined[-1] if joined else None
        follows = last is not None and bool(last.tool_calls)
        results = _text_results(message.text) if message.role == "user" and follows else []
        if results:
            joined += [Message("tool", result) for result in results]
        elif last is None or last.role != "assistant" or message.role != "assistant":
            joined.append(message)
        elif last == message and not last.tool_calls:  # a call may be made twice at once
            raise _NoRun("a turn that stands twice")
        elif last.tool_calls and (message.text.strip() or message.reasoning.strip()):
            raise _NoRun("a call without a result, followed by another turn")
        else:
            texts = [each for each in (last.text, message.text) if each.strip()]
            thoughts = [each for each in (last.reasoning, message.reasoning) if each.strip()]
            joined[-1] = last._replace(
                text="\n".join(texts),
                reasoning="\n".join(thoughts),
                tool_calls=(*last.tool_calls, *message.tool_calls),
                others=last.others + message.others,
                sampled=last.sampled and message.sampled,
            )
    return joined


def _with_calls(message: Message) -> Message:
    """Return a message of the model in which calls that stand in the text are calls. Raises _NoRun for a text that has
    other calls than the message."""
    for begin, end in _TEXT_CALLS:
        before, *pieces = message.text.split(begin)
        texts, calls = [before], list[ToolCall]()
        for piece in pieces:
            name, _, body = piece.partition(">") if begin.endswith("=") else ("", "", piece)
            body = body.lstrip()
            try:
                value, stop = _DECODER.raw_decode(body)
            except (ValueError, RecursionError):
                return message
            after = body[stop:].lstrip()
            if not after.startswith(end):
                return message
            texts.append(after.removeprefix(end))
            listed = value if isinstance(value, list) else [value]
            calls += [read_call({"name": name, "arguments": each} if name else each) for each in listed]
        if calls:
            own = [call._replace(call_id="") for call in message.tool_calls]
            if own and own != [call._replace(call_id="") for call in calls]:
                raise _NoRun("calls in the text that are not the message's")
            return message._replace(text="".join(texts).strip(), tool_calls=message.tool_calls or tuple(calls))
    return message


def _text_results(text: str) -> list[str]:
    """Return the results that a text consists of, as templates without a role for them write it; none of another."""
    begin, end = _TEXT_RESULT
    *blocks, rest = text.strip().split(end)
    blocks = [block.lstrip() for block in blocks]
    if rest or not all(block.startswith(begin) for block in blocks):
        return []
    return [block.removeprefix(begin).removeprefix("\n").removesuffix("\n") for block in blocks]


def _text_problem(message: Message) -> str:
    """Return what is wrong with the text of a message; empty if nothing is."""
    if message.role == "assistant" and any(mark in message.text for mark in _CALL_MARKS):
        return "a call that is written as text"
    return ""


def _problem(message: Message, tools: frozenset[str], *, begun: bool) -> str:
    """Return what is wrong with a message that is no result; empty if nothing is. `begun`: the model has spoken."""
    if problem := _text_problem(message):
        return problem
    if message.others:
        return "a part that is no text"
    if message.role == "tool":
        return "a result without a call before it"
    if message.role != "assistant":
        if message.role not in ("user", "system") or (begun and message.role == "system"):
            return f"a message of {message.role[:40]!r} where no template has one"
        return "a call that is not the model's" if message.tool_calls else ""
    if not all(call.name for call in message.tool_calls):
        return "a call without a name"
    if tools and not all(call.name in tools for call in message.tool_calls):
        return "a call of a tool that it does not have"
    if not all(isinstance(call.arguments, Mapping) for call in message.tool_calls):
        return "a call whose arguments are no JSON object"
    spoken = message.text.strip() or message.reasoning.strip() or message.tool_calls
    return "" if spoken else "an empty turn"


def _checked(messages: Sequence[Message], tools: frozenset[str]) -> list[Message]:
    """Return the messages of a run with calls, each turn followed by its results in the order of its calls, without
    ids. Raises _NoRun for what is no run. `tools`: the names of its tools; empty: unknown."""
    checked: list[Message] = []
    begun = False
    place = 0
    while place < len(messages):
        message = _with_thought(messages[place])
        place += 1
        if problem := _problem(message, tools, begun=begun):
            raise _NoRun(problem)
        if message.role != "assistant":
            checked.append(message)
            continue
        begun = True
        begin = place
        while place < len(messages) and messages[place].role == "tool":
            place += 1
        results = _in_order(message.tool_calls, messages[begin:place])
        if len(results) < len(message.tool_calls) and place < len(messages):
            raise _NoRun("a call without a result, followed by another turn")
        calls = tuple(call._replace(call_id="") for call in message.tool_calls)
        checked += [message._replace(tool_calls=calls), *results]
    return checked


def _with_thought(message: Message) -> Message:
    """Return a turn of the model with the reasoning that begins its text in its own field; any other message as it is.
    Raises _NoRun for another reasoning there."""
    match = _THOUGHT.match(message.text) if message.role == "assistant" else None
    if match is None:
        return message
    if message.reasoning.strip() not in ("", match[1].strip()):
        raise _NoRun("reasoning in the text that is not the turn's")
    return message._replace(text=message.text[match.end() :], reasoning=message.reasoning or match[1].strip("\n"))


def _in_order(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[Message]:
    """Return results in the order of their calls, each with its tool's name: by its id, else by its name, else by its
    place. Raises _NoRun for one of no call, and for a call that has one while an earlier one has none."""
    by_id: dict[str, deque[int]] = {}
    by_name: dict[str, deque[int]] = {}
    for number, call in enumerate(calls):
        by_id.setdefault(call.call_id, deque()).append(number)
        by_name.setdefault(call.name, deque()).append(number)
    has_ids = any(by_id.keys() - {""})
    ordered: dict[int, Message] = {}
    first = 0
    for result in results:
        if result.others:
            raise _NoRun("a part that is no text")
        while first in ordered:
            first += 1
        if result.call_id and has_ids:
            waiting = by_id.get(result.call_id, deque())
        elif result.name:
            waiting = by_name.get(result.name, deque())
        else:
            waiting = deque([first])
        while waiting and waiting[0] in ordered:
            waiting.popleft()
        if not waiting or waiting[0] >= len(calls):
            known = result.call_id in by_id or (result.name and result.name in by_name)
            raise _NoRun("a call with two results" if known else "a result without a call before it")
        number = waiting[0]
        ordered[number] = result._replace(name=calls[number].name, call_id="")
    if sorted(ordered) != list(range(len(ordered))):
        raise _NoRun("a call without a result, followed by one with a result")
    return [ordered[number] for number in range(len(ordered))]
