"""The one reader of agents' runs in files: any notation becomes the same `Conversation`, or one with its problem.

Read are chats of OpenAI (also `function_call` and the items of Responses), Anthropic (`tool_use`, `tool_result`),
Google (`functionCall`, `functionResponse`), Amazon (`toolUse`, `toolResult`), LangChain and the AI SDK; `from` and
`value` of ShareGPT and LLaMA-Factory; nodes of a trace of verifiers; steps of ATIF; and calls that Hermes, Mistral and
Llama write as text. Then the shape is checked, since a learner would be taught what it has: each result belongs to a
call before it and stands where a template is read as its answer, each call has a tool, no turn is empty, nothing
stands twice, and no part is left out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from mutualrl.tasks.messages import from_text, read_call, without_end
from mutualrl.tasks.notations import last_branch, messages_of, unwrapped
from mutualrl.trajectory import Conversation, Message, ToolCall

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
    *(begin for begin, _ in _TEXT_CALLS),
    *("<function_call>", "<functioncall>", "<|tool_call|>", "<|tool_call>", "<|action_start|>", "<invoke name="),
    "<\uff5ctool\u2581call",
)
_DECODER = json.JSONDecoder()
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


#: columns that hold a conversation, in order of preference
CONVERSATIONS = ("conversations", "messages", "nodes", "steps")
#: columns that tell the steps of a run in ATIF from steps of another kind
_ATIF = ("schema_version", "agent")


class _NoRun(Exception):  # noqa: N818  (a verdict on a file's run, kept as its problem)
    """What keeps messages from being a run."""


def read_trajectory(values: object, tools: object = None) -> Conversation | None:
    """Return the conversation of a row; None if its value is no list of messages. `values`: the list, or its JSON text.
    `tools`: the schemas of the row's tools, if it has any (a list, or its JSON text)."""
    values = from_text(values)
    if not isinstance(values, list | tuple):
        return None
    required = _required(tools)
    path, branches, broken = last_branch(values)
    messages: list[Message] = []
    for value in path:
        read = messages_of(value, required)
        if read is None:
            return None
        messages += read
    try:
        if broken:
            raise _NoRun(broken)
        messages = _joined(messages)
        turns = sum(message.role == "assistant" for message in messages)
        if turns > 1 or any(message.tool_calls or message.role == "tool" for message in messages):
            return Conversation(tuple(_checked(messages, frozenset(required))), branches)
        problem = next(filter(None, map(_text_problem, messages)), "")
        return Conversation(tuple(messages), branches, problem)
    except _NoRun as problem:
        return Conversation(tuple(messages), branches, str(problem))


def is_conversation(column: str, columns: Collection[str]) -> bool:
    """Return whether a column of a file holds conversations: `steps` do in a run of ATIF."""
    named = column in CONVERSATIONS and column in columns
    return named and (column != "steps" or any(name in columns for name in _ATIF))


def trajectory_of(row: Mapping[str, object]) -> Conversation | None:
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


# ---- the shape of a whole run


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which a turn of the model is one: a call that was written as text is a call, results in a
    user's message are results, and what was written as several messages is one. Raises _NoRun."""
    joined: list[Message] = []
    for is_turn, group in itertools.groupby(messages, lambda message: message.role == "assistant"):
        if is_turn:
            joined.append(_one_turn([_with_calls(message) for message in group]))
            continue
        for message in group:
            last = joined[-1] if joined else None
            follows = last is not None and (bool(last.tool_calls) or last.role == "tool")
            results = unwrapped(message.text) if message.role == "user" and follows else []
            joined += [Message("tool", result) for result in results] or [message]
    return joined


def _one_turn(parts: Sequence[Message]) -> Message:
    """Return a turn of the model that was written as several messages. Raises _NoRun for a message that stands twice,
    and for a text after a call, which another turn begins."""
    if len(parts) == 1:
        return parts[0]
    calls: list[ToolCall] = []
    known: set[str] = set()
    for before, part in zip([None, *parts], parts, strict=False):
        repeated = part == before and not part.tool_calls and (part.text.strip() or part.reasoning.strip())
        ids = {call.call_id for call in part.tool_calls if call.call_id}
        if repeated or ids & known:
            raise _NoRun("a turn that stands twice")
        known |= ids
        if calls and part.text.strip():
            raise _NoRun("a call without a result, followed by another turn")
        calls += part.tool_calls
    return parts[0]._replace(
        text="\n".join(part.text for part in parts if part.text.strip()),
        reasoning="\n".join(part.reasoning for part in parts if part.reasoning.strip()),
        tool_calls=tuple(calls),
        others=sum(part.others for part in parts),
        sampled=all(part.sampled for part in parts),
    )


def _with_calls(message: Message) -> Message:
    """Return a message of the model in which calls that stand in the text are calls: not those in its reasoning, nor in
    a block of code. Raises _NoRun for a text that has other calls than the message."""
    head, said = _split_thought(message.text)
    for begin, end in _TEXT_CALLS:
        before, *pieces = said.split(begin)
        if not pieces or before.count("```") % 2:
            continue
        texts, calls = [before], list[ToolCall]()
        for piece in pieces:
            name, _, body = piece.partition(">") if begin.endswith("=") else ("", "", piece)
            body = body.lstrip()
            try:
                value, stop = _DECODER.raw_decode(body)
            except (ValueError, RecursionError):
                return message
            listed = value if isinstance(value, list) else [value]
            calls += [read_call({"name": name, "arguments": each} if name else each) for each in listed]
            after = body[stop:].lstrip()
            if not after.startswith(end) or not all(isinstance(each, Mapping) for each in listed) or not calls[-1].name:
                return message
            texts.append(after.removeprefix(end))
        own = [call._replace(call_id="") for call in message.tool_calls]
        if own and own != [call._replace(call_id="") for call in calls]:
            raise _NoRun("calls in the text that are not the message's")
        rest = without_end("".join(texts)).strip()
        return message._replace(text=head + rest, tool_calls=message.tool_calls or tuple(calls))
    return message


def _split_thought(text: str) -> tuple[str, str]:
    """Return the reasoning that begins a text, with its marks, and the rest."""
    thought = _THOUGHT.match(text)
    end = 0 if thought is None else thought.end()
    return text[:end], text[end:]


def _text_problem(message: Message) -> str:
    """Return what is wrong with the text of a message; empty if nothing is."""
    if message.role != "assistant" or not any(mark in message.text for mark in _CALL_MARKS):
        return ""
    _, said = _split_thought(message.text)
    outside = "".join(said.split("```")[::2])  # of blocks of code
    return "a call that is written as text" if any(mark in outside for mark in _CALL_MARKS) else ""


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
