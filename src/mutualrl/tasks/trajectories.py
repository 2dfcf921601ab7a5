"""What a learner, and who reads a log, is shown of a trajectory.

A call may lack a result: TRL takes a result back that is too long for the completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from mutualrl.tasks.boxed import final_answer
from mutualrl.tasks.messages import read_call, read_message
from mutualrl.trajectory import Message, ToolCall, Trajectory


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


def names_of(tools: str) -> frozenset[str]:
    """Return the names of tools that are stored as schemas."""
    schemas = json.loads(tools)
    return frozenset(read_call(schema).name for schema in schemas)


def own_words(run: Trajectory) -> str:
    """Return what the model wrote outside of calls, reasoning and contents, a line each, without the run's answer: the
    content of the last box of its final text, or else the last line of that."""
    texts = []
    answer, turns = final_answer(run.answer), run.turns
    last = max((place for place, turn in enumerate(turns) if turn.text.strip()), default=-1)
    for place, turn in enumerate(turns):
        ends = place == last and answer
        before, _, after = turn.text.rpartition(answer) if ends else (turn.text, "", "")
        texts += [turn.reasoning, before.removesuffix("\\boxed{") + after.removeprefix("}")]
    return "\n".join(text for text in texts if text.strip())


def written(call: ToolCall) -> str:
    """Return a call as a line: its name, and its arguments as JSON, in which 3 and "3" differ."""
    arguments = call.arguments
    if isinstance(arguments, Mapping):
        arguments = json.dumps(dict(arguments), ensure_ascii=False)
    return f"{call.name} {arguments}"


def plan(run: Trajectory, *, answer: bool = False) -> str:
    """Return the calls of a run as a numbered plan, without their results; `answer`: with the run's final text. Empty
    without a call (and without an answer)."""
    lines = [f"{number}. {written(call)}" for number, call in enumerate(run.calls, 1)]
    if answer and (text := run.answer.strip()):
        lines.append(f"Answer: {text}")
    return "\n".join(lines)


def transcript(run: Trajectory, shorten: Callable[[str], str] = str) -> str:
    """Return a whole run as text: what the model said, its calls, and the results, each cut by `shorten`."""
    lines = []
    for message in run.messages:
        if not message.is_turn:
            lines.append(f"[{message.name or message.role}] {shorten(message.text)}")
            continue
        lines += [message.text] if message.text.strip() else []
        lines += [f"-> {written(call)}" for call in message.tool_calls]
    return "\n".join(lines)


def shown(written: Trajectory, most: int, cut: Callable[[str, int], str]) -> str | list[dict[str, str]]:
    """Return what was written for people: a text, cut to `most`, or the turns of a run (`turns_within`)."""
    return cut(written.text, most) if written.is_text else turns_within(written, most)


def turns_within(run: Trajectory, most: int) -> list[dict[str, str]]:
    """Return a run for people, a `role` and a `content` per message, in at most `most` bytes of JSON in UTF-8 (and the
    100 of a note): calls are lines of the content, and a result has its tool in the role. Messages are cut, the later
    ones left out, and both noted. `most` is at least 200."""
    turns: list[dict[str, str]] = []
    room = most
    for place, message in enumerate(run.messages):
        if room < 200:
            turns.append({"role": "", "content": f"[... {len(run.messages) - place} more messages]"})
            break
        lines = [message.text] if message.text else []
        content = "\n".join([*lines, *(f"-> {written(call)}" for call in message.tool_calls)])
        role = f"{message.role} {message.name}".strip() if not message.is_turn else message.role
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
