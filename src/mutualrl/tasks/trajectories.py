"""Runs of an agent as records: messages with calls of tools and their results, and what a learner is shown of them.

A trajectory is JSON text, the `messages` of a chat with calls: `role`, `content`, and where there are any `reasoning`,
`tool_calls` (`function` with `name` and typed `arguments`), `name`, `tool_call_id`, and `sampled` for what the policy
sampled. A call may lack a result: TRL takes a result back that is too long for the completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from mutualrl.records import Message, ToolCall
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.boxed import final_answer
from mutualrl.tasks.messages import read_call, read_message
from mutualrl.tasks.notations import ASSISTANT


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
