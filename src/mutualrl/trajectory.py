"""What a model wrote on a prompt: a text, or an agent's run with calls of tools and their results. One value for both.

Who holds a `Trajectory` asks it. It is parsed where a shard or a file is read
(`Trajectory.of_stored`) and becomes JSON again where it is stored (`Trajectory.stored`), to the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple


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

    @property
    def is_turn(self) -> bool:
        """Return whether the model wrote it."""
        return self.role == "assistant"


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The messages from the model's first on. Two are equal if they are stored as the same.

    A text is the trajectory of one message, its words as they were sampled or written. A run has been through a chat
    template, also one without a call.
    """

    messages: tuple[Message, ...]
    is_text: bool = False
    """Whether it is a text."""

    @classmethod
    def of_text(cls, text: str) -> Trajectory:
        """Return a text as a trajectory."""
        return cls((Message("assistant", text),), is_text=True)

    @classmethod
    def of_run(cls, messages: Iterable[Message]) -> Trajectory:
        """Return a run, as it would be read where it is stored. Arguments that are nested too deeply for JSON, which a
        model may write, become a text that says so."""
        listed = list(messages)
        try:
            run = cls.of_json(_as_json(listed))
        except RecursionError:
            run = cls(())
        if listed and not run.messages:  # too deep to be written, or to be read
            flat = []
            for message in listed:
                calls = tuple(call._replace(arguments="nested too deeply") for call in message.tool_calls)
                flat.append(message._replace(tool_calls=calls))
            run = cls.of_json(_as_json(flat))
        return run

    @classmethod
    def of_stored(cls, text: str | None, messages: str | None) -> Trajectory | None:
        """Return what two columns of a shard hold: a text, which is None where it was not published, or of a run with
        what it said the messages as JSON."""
        if text is None:
            return None
        return cls.of_text(text) if messages is None else cls.of_json(messages)

    @classmethod
    def of_json(cls, stored: str) -> Trajectory:
        """Return a stored run; one without messages for anything that `as_chat` does not write."""
        try:
            run = cls(tuple(_message(chat) for chat in json.loads(stored)))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            run = cls(())
        vars(run)["stored"] = stored
        return run

    @cached_property
    def stored(self) -> str | None:
        """Return a run as it is stored; None for a text, which is stored as it is."""
        return None if self.is_text else self.of_run(self.messages).stored

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trajectory) and (self.stored, self.text) == (other.stored, other.text)

    def __hash__(self) -> int:
        return hash((self.stored, self.text))

    @cached_property
    def text(self) -> str:
        """Return the text; of a run what the model said, the contents of its messages, a line each."""
        if self.is_text:
            return self.messages[0].text
        return "\n".join(message.text for message in self.turns if message.text.strip())

    @property
    def answer(self) -> str:
        """Return the text; of a run the model's last message with text."""
        return next((turn.text for turn in reversed(self.turns) if self.is_text or turn.text.strip()), "")

    @property
    def turns(self) -> list[Message]:
        """Return the model's messages."""
        return [message for message in self.messages if message.is_turn]

    @property
    def calls(self) -> list[ToolCall]:
        """Return the calls of the model, in order, without their ids."""
        return [call._replace(call_id="") for turn in self.turns for call in turn.tool_calls]

    def first(self, turns: int | None) -> Trajectory:
        """Return it up to and including the model's message of this number; all of it with None, or if it has fewer."""
        places = self._places
        if turns is None or turns >= len(places):
            return self
        return Trajectory.of_run(self.messages[: places[turns - 1] + 1])

    def beginning(self, turns: int) -> Trajectory | None:
        """Return the model's first messages, each with the results that followed it; None if the last of them has no
        result, or one is not a tool's: such turns cannot be replayed."""
        places = self._places
        part = self.messages[: places[turns]] if turns < len(places) else self.messages
        results = [message for message in part if not message.is_turn]
        acted = all(message.tool_calls for message in part if message.is_turn)
        if not part or part[-1].is_turn or not acted or any(message.role != "tool" for message in results):
            return None
        return Trajectory.of_run(part)

    @property
    def chats(self) -> list[dict[str, object]]:
        """Return the messages in the form of chats, as TRL has them; who gets them may change them."""
        chats: list[dict[str, object]] = json.loads(json.dumps(as_chats(self.messages)))
        return chats

    @property
    def _places(self) -> list[int]:
        return [place for place, message in enumerate(self.messages) if message.is_turn]


#: the empty text
NO_TEXT = Trajectory.of_text("")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and what a model wrote on it, from whatever a file writes it in (`tasks.run_reader`).

    Roles are `system`, `user`, `assistant` and `tool`; a turn of the model is one message; the results of its calls
    follow it in the order of the calls, each with its tool's name. Equal runs are equal values, whatever their file's
    notation.
    """

    messages: tuple[Message, ...]
    """All messages, those of the prompt first."""
    branches: int = 0
    """Branches of a trace beside the last, which are left out."""
    problem: str = ""
    """Why it is no run that could be learnt; empty if it is one."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Return the messages before the model's first."""
        return self.messages[: self._begin]

    @property
    def after(self) -> tuple[Message, ...]:
        """Return the messages from the model's first on."""
        return self.messages[self._begin :]

    @property
    def run(self) -> Trajectory:
        """Return the trajectory from the model's first message on."""
        return Trajectory(self.after)

    @property
    def prompts(self) -> list[str]:
        """Return the texts by which the prompt may be known: the user's last one, if there is any, and all together."""
        users = [message.text for message in self.prompt if message.role == "user"]
        return [*users[-1:], "\n".join(message.text for message in self.prompt)]

    @property
    def is_run(self) -> bool:
        """Return whether it is more than an answer: it has a call, a result, or several turns of the model."""
        return len(self.after) > 1 or any(message.tool_calls for message in self.after)

    @property
    def calls(self) -> list[tuple[ToolCall, Message | None]]:
        """Return each call with its result; None for a call at the end of the run, which has none."""
        pairs: list[tuple[ToolCall, Message | None]] = []
        for place, message in enumerate(self.messages):
            results = self.messages[place + 1 : place + 1 + len(message.tool_calls)]
            answered = [result if result.role == "tool" else None for result in results]
            pairs += zip_longest(message.tool_calls, answered)
        return pairs

    @property
    def _begin(self) -> int:
        places = (place for place, message in enumerate(self.messages) if message.is_turn)
        return next(places, len(self.messages))


def as_chats(messages: Iterable[Message]) -> list[dict[str, object]]:
    """Return messages in the form of chats, as TRL has them."""
    return [as_chat(message._replace(sampled=False)) for message in messages]


def as_chat(message: Message) -> dict[str, object]:
    """Return a message in the form of chats; `sampled` if it was."""
    chat: dict[str, object] = {"role": message.role, "content": message.text}
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


def _as_json(messages: Iterable[Message]) -> str:
    """Return messages as a run stores them; UTF-8 has no lone surrogates. Raises RecursionError."""
    text = json.dumps([as_chat(message) for message in messages], ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _message(chat: Mapping[str, Any]) -> Message:
    """Invert `as_chat`. Raises KeyError, TypeError or ValueError for anything else, which a foreign file may have."""
    calls = []
    for each in chat.get("tool_calls", ()):
        name, arguments = each["function"]["name"], each["function"]["arguments"]
        if not isinstance(arguments, dict | str):
            raise TypeError("arguments of another type")
        calls.append(ToolCall(_string(name), arguments, _string(each.get("id", ""))))
    reasoning = _string(chat.get("reasoning", ""))
    return Message(
        _string(chat["role"]),
        _string(chat["content"]),
        reasoning if reasoning.strip() else "",
        tuple(calls),
        name=_string(chat.get("name", "")),
        call_id=_string(chat.get("tool_call_id", "")),
        sampled=chat.get("sampled", False) is True,
    )


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"found {type(value).__name__}, expected a text")
    return value
