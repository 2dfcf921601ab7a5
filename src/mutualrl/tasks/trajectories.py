"""Runs of an agent as records: messages with calls of tools and their results, and what a learner is shown of them.

A trajectory is JSON text, the `messages` of a chat with calls: `role`, `content`, and where there are any `reasoning`,
`tool_calls` (`function` with `name` and typed `arguments`), `name`, `tool_call_id`, and `sampled` for what the policy
sampled. A call may lack a result: TRL takes a result back that is too long for the completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mutualrl.storage.files import JsonObject
from mutualrl.tasks.boxed import final_answer
from mutualrl.tasks.messages import Message, ToolCall, read_call, read_message

#: roles of the model's messages
ASSISTANT = frozenset(("assistant", "gpt", "model", "chatgpt", "bot", "agent"))
#: roles of the user's
USER = frozenset(("user", "human"))


class Conversation(NamedTuple):
    """Messages of an agent's run, and the number of branches beside the last, which are left out. The prompt ends where
    the model begins."""

    messages: list[Message]
    branches: int = 0

    @property
    def after(self) -> list[Message]:
        """Return the messages after the prompt."""
        return self.messages[self._end :]

    @property
    def prompts(self) -> list[str]:
        """Return the texts by which the prompt may be known: the user's last one, if there is any, and all together."""
        asked = self.messages[: self._end]
        users = [message.text for message in asked if message.role in USER]
        return [*users[-1:], "\n".join(message.text for message in asked)]

    @property
    def _end(self) -> int:
        places = (place for place, message in enumerate(self.messages) if message.role in ASSISTANT)
        return next(places, len(self.messages))


def read_conversation(values: Sequence[object]) -> Conversation | None:
    """Return the messages of a run in a file: a chat's, those of `from` and `value`, the nodes of a trace of verifiers
    (of several branches the last), or the steps of ATIF. None if one of them is no message."""
    path, branches = _last_branch(values)
    messages: list[Message] = []
    for value in path:
        found = _of_step(value) if isinstance(value, Mapping) and _is_step(value) else [_of_chat(value)]
        if any(message is None for message in found):
            return None
        messages += [_with_plain_role(message) for message in found if message is not None]
    return Conversation(_with_names(messages), branches)


def _with_plain_role(message: Message) -> Message:
    """Return a message with the role that chat templates know."""
    role = "assistant" if message.role in ASSISTANT else "user" if message.role in USER else message.role
    return message._replace(role=role)


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
    path: list[int] = []
    place: int | None = len(nodes) - 1 if nodes else None
    while place is not None and 0 <= place < len(nodes) and place not in path:
        path.append(place)
        place = parents[place]
    ends = set(range(len(nodes))) - {parent for parent in parents if parent is not None}
    return [nodes[place] for place in reversed(path)], max(len(ends) - 1, 0)


def _is_step(value: Mapping[str, object]) -> bool:
    """Return whether a value is a step of ATIF: it has a source in place of a role."""
    return not {"role", "from"} & value.keys() and value.get("source") in ("user", "agent", "system")


def _of_chat(value: object) -> Message | None:
    """Return a message. A `function_call` of `from` and `value` is a call, an `observation` its result."""
    message = read_message(value)
    if message is None or message.role not in ("function_call", "observation"):
        return message
    if message.role == "observation":
        return message._replace(role="tool")
    try:
        call = read_call(json.loads(message.text))
    except (ValueError, RecursionError):
        call = ToolCall("", message.text)
    return Message("assistant", "", tool_calls=(call,))


def _of_step(step: Mapping[str, object]) -> list[Message | None]:
    """Return a step of ATIF: the message of its source with its calls, then their results."""
    role = "assistant" if step["source"] == "agent" else str(step["source"])
    chat = {"role": role, "content": step.get("message"), "tool_calls": step.get("tool_calls")}
    found = [read_message({**chat, "reasoning_content": step.get("reasoning_content")})]
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, Mapping) else None
    for result in results if isinstance(results, list | tuple) else ():
        if isinstance(result, Mapping):
            key = result.get("source_call_id")
            found.append(read_message({"role": "tool", "content": result.get("content"), "tool_call_id": key}))
    return found


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the tool's name in each result: of the call with its id, else of the first call without a
    result."""
    named: list[Message] = []
    waiting: list[ToolCall] = []
    for message in messages:
        if message.role in ASSISTANT:
            waiting = list(message.tool_calls)
        elif message.role == "tool":
            call = _answered(message, waiting)
            if call is not None:
                waiting.remove(call)
                named.append(message._replace(name=message.name or call.name))
                continue
        named.append(message)
    return named


def _answered(result: Message, waiting: Sequence[ToolCall]) -> ToolCall | None:
    """Return the call that a result answers: by its id, its name, or its place."""
    for matches in (
        [call for call in waiting if result.call_id and call.call_id == result.call_id],
        [call for call in waiting if result.name and call.name == result.name],
        [] if result.name else waiting,
    ):
        if matches:
            return matches[0]
    return None


def is_run(messages: Iterable[Message]) -> bool:
    """Return whether messages after a prompt are an agent's run: with a call, a result, or several of the model's."""
    after = list(messages)
    return bool(calls_of(after)) or any(m.role not in ASSISTANT for m in after) or len(after) > 1


def as_json(messages: Iterable[Message]) -> str:
    """Return a trajectory as it is stored. A lone surrogate, which UTF-8 cannot have, becomes a question mark."""
    text = json.dumps([_as_chat(message) for message in messages], ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def from_json(text: str | None) -> tuple[Message, ...]:
    """Return the messages of a stored trajectory; none for None, and for a text that is no list of messages."""
    if text is None:
        return ()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    messages = [read_message(value) for value in values] if isinstance(values, list) else []
    return tuple(message for message in messages if message is not None)


def first_turns(messages: Sequence[Message], turns: int | None) -> tuple[Message, ...]:
    """Return a run up to and including the model's message of this number; all of it with None, or if it has fewer."""
    places = [place for place, message in enumerate(messages) if message.role in ASSISTANT]
    return tuple(messages if turns is None or turns >= len(places) else messages[: places[turns - 1] + 1])


def turns_of(messages: Sequence[Message]) -> int:
    """Return the number of the model's messages."""
    return sum(message.role in ASSISTANT for message in messages)


def beginning(messages: Sequence[Message], turns: int) -> tuple[Message, ...]:
    """Return the model's first messages, each with the results that followed it; none if the last of them has no
    result, or one is not a tool's: such turns cannot be replayed."""
    places = [place for place, message in enumerate(messages) if message.role in ASSISTANT]
    part = tuple(messages[: places[turns]] if turns < len(places) else messages)
    results = [message for message in part if message.role not in ASSISTANT]
    acted = all(message.tool_calls for message in part if message.role in ASSISTANT)
    if not part or part[-1].role in ASSISTANT or not acted or any(message.role != "tool" for message in results):
        return ()
    return part


def as_chats(messages: Iterable[Message]) -> list[JsonObject]:
    """Return messages in the form of chats, as TRL has them."""
    return [_as_chat(message._replace(sampled=False)) for message in messages]


def messages_of(chats: Sequence[Mapping[str, object]]) -> list[Message]:
    """Return the messages of a prompt. Raises ValueError for one with parts that are no text."""
    messages = [read_message(chat) for chat in chats]
    if any(message is None or message.others for message in messages):
        raise ValueError("its prompt has parts that are no text")
    return [message for message in messages if message is not None]


def of_completion(completion: Sequence[Mapping[str, object]]) -> tuple[Message, ...]:
    """Return the messages of a completion of TRL, of which the assistant's are sampled."""
    messages = [read_message(message) for message in completion]
    return tuple(message._replace(sampled=message.role == "assistant") for message in messages if message is not None)


def calls_of(messages: Iterable[Message]) -> list[ToolCall]:
    """Return the calls of the model, in order, without their ids."""
    calls = [call for message in messages if message.role in ASSISTANT for call in message.tool_calls]
    return [call._replace(call_id="") for call in calls]


def names_of(tools: str) -> frozenset[str]:
    """Return the names of tools that are stored as schemas."""
    schemas = json.loads(tools)
    return frozenset(read_call(schema).name for schema in schemas)


def said(messages: Iterable[Message]) -> str:
    """Return what the model said: the contents of its messages, a line each."""
    return "\n".join(message.text for message in messages if message.role in ASSISTANT and message.text.strip())


def final_text(messages: Sequence[Message]) -> str:
    """Return the model's last message with text: the answer of the run."""
    return next((m.text for m in reversed(messages) if m.role in ASSISTANT and m.text.strip()), "")


def own_words(messages: Sequence[Message]) -> str:
    """Return what the model wrote outside of calls, reasoning and contents, a line each, without the run's answer: the
    content of the last box of its final text, or else the last line of that."""
    texts = []
    answer = final_answer(final_text(messages))
    last = max((place for place, m in enumerate(messages) if m.role in ASSISTANT and m.text.strip()), default=-1)
    for place, message in enumerate(messages):
        if message.role in ASSISTANT:
            ends = place == last and answer
            before, _, after = message.text.rpartition(answer) if ends else (message.text, "", "")
            texts += [message.reasoning, before.removesuffix("\\boxed{") + after.removeprefix("}")]
    return "\n".join(text for text in texts if text.strip())


def written(call: ToolCall) -> str:
    """Return a call as a line: its name, and its arguments as JSON, in which 3 and "3" differ."""
    arguments = call.arguments
    if isinstance(arguments, Mapping):
        arguments = json.dumps(dict(arguments), ensure_ascii=False)
    return f"{call.name} {arguments}"


def plan(messages: Sequence[Message], *, answer: bool = False) -> str:
    """Return the calls of a run as a numbered plan, without their results; `answer`: with the run's final text. Empty
    without a call (and without an answer)."""
    lines = [f"{number}. {written(call)}" for number, call in enumerate(calls_of(messages), 1)]
    if answer and (text := final_text(messages).strip()):
        lines.append(f"Answer: {text}")
    return "\n".join(lines)


def transcript(messages: Sequence[Message], shorten: Callable[[str], str] = str) -> str:
    """Return a whole run as text: what the model said, its calls, and the results, each cut by `shorten`."""
    lines = []
    for message in messages:
        if message.role not in ASSISTANT:
            lines.append(f"[{message.name or message.role}] {shorten(message.text)}")
            continue
        lines += [message.text] if message.text.strip() else []
        lines += [f"-> {written(call)}" for call in message.tool_calls]
    return "\n".join(lines)


def turns_within(messages: Sequence[Message], most: int) -> list[dict[str, str]]:
    """Return a run for people, a `role` and a `content` per message, in at most `most` bytes of JSON in UTF-8 (and the
    100 of a note): calls are lines of the content, and a result has its tool in the role. Messages are cut, the later
    ones left out, and both noted. `most` is at least 200."""
    turns: list[dict[str, str]] = []
    room = most
    for place, message in enumerate(messages):
        if room < 200:
            turns.append({"role": "", "content": f"[... {len(messages) - place} more messages]"})
            break
        lines = [message.text] if message.text else []
        content = "\n".join([*lines, *(f"-> {written(call)}" for call in message.tool_calls)])
        role = f"{message.role} {message.name}".strip() if message.role not in ASSISTANT else message.role
        turn = {"role": cut(role, 64), "content": cut(content, room - 128)}
        room -= _size(turn)
        turns.append(turn)
    return turns


def cut(text: str, most: int) -> str:
    """Return a text, cut to `most` bytes of JSON with a note of how many characters are missing; a lone surrogate,
    which UTF-8 cannot have, becomes a question mark."""
    text = text.encode("utf-8", "replace").decode()
    length = min(len(text), most)
    while (size := _size(text[:length]) - 2) > most:
        length = length * most // size
    return text if length == len(text) else f"{text[:length]} [... {len(text) - length} more characters]"


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _as_chat(message: Message) -> JsonObject:
    """Return a message in the form of chats."""
    chat: JsonObject = {"role": message.role, "content": message.text}
    if message.reasoning:
        chat["reasoning"] = message.reasoning
    if message.tool_calls:
        chat["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.call_id} if call.call_id else {}),
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.name:
        chat["name"] = message.name
    if message.call_id:
        chat["tool_call_id"] = message.call_id
    return {**chat, "sampled": True} if message.sampled else chat
