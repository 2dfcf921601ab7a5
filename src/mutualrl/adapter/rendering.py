"""A conversation as a learner's tokens, built as TRL's loop builds its own rollouts.

TRL samples after a rendered prompt, appends what its template puts between a call and the next answer, and samples on:
the context is a concatenation of segments, never one rendering of the whole conversation, in which templates change
earlier turns. So each answer's text is a difference of two renderings, up to and including the answer and before it
with the generation prompt, and each segment is tokenized apart. The end token is sampled, so it belongs to the answer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)

from mutualrl.storage.files import JsonObject
from mutualrl.tasks.notations import ASSISTANT
from mutualrl.trajectory import Message

#: names of the field with a message's reasoning in templates, the most common first
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_CONTROL_END = re.compile(r"<\|[^|<>]+\|>$")  # some templates end a call otherwise than an answer
_PLAIN = "mutualrl plain answer"  # a text that no template changes


class Unrenderable(ValueError):  # noqa: N818  (a verdict on a conversation, not an error of the program)
    """A conversation that a template cannot keep, with the reason."""


class Segment(NamedTuple):
    """Part of a row: an answer, which the model samples, or what the template puts between two."""

    text: str
    ids: list[int]
    sampled: bool


@dataclass(frozen=True)
class Row:
    """A conversation as TRL would have sampled it."""

    prompt_ids: list[int]
    segments: list[Segment]

    @property
    def ids(self) -> list[int]:
        """Return the completion's token ids."""
        return [token for segment in self.segments for token in segment.ids]

    @property
    def mask(self) -> list[int]:
        """Return 1 for each token that the model samples, 0 for the others."""
        return [int(segment.sampled) for segment in self.segments for _ in segment.ids]


class Renderer:
    """Renders conversations with one tokenizer's chat template. `tools`: schemas, always passed to the template."""

    def __init__(self, tokenizer: Any, tools: Sequence[JsonObject] = (), settings: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self._tools = list(tools) or None
        self._settings = dict(settings or {})
        template = str(self._settings.get("chat_template") or tokenizer.chat_template or "")
        used = [key for key in REASONING_KEYS if re.search(rf"\b{key}\b", template)]
        self.reasoning_key = used[0] if used else REASONING_KEYS[0]
        self.end = self._end_of_turn()
        self._control = sorted({token.content for token in tokenizer.added_tokens_decoder.values()})

    def row(self, prompt: Sequence[Message], after: Sequence[Message]) -> Row:
        """Return the row of a conversation, of which the model answers in `after`. Raises Unrenderable."""
        self._require_plain_text([*prompt, *after])
        segments: list[Segment] = []
        prompt_ids = self._encoded(self._rendered(prompt, begin=True))
        context = list(prompt_ids)
        place = 0
        while place < len(after):
            message = after[place]
            if message.role in ASSISTANT:
                text = self.answer([*prompt, *after[:place]], message)
                segment = Segment(text, self._encoded(text), sampled=True)
                self._require_kept(message, segment, context)
                place += 1
            else:
                results = []
                while place < len(after) and after[place].role not in ASSISTANT:
                    results.append(after[place])
                    place += 1
                text = self.between(results)
                segment = Segment(text, self._encoded(text), sampled=False)
            segments.append(segment)
            context += segment.ids
        return Row(prompt_ids, segments)

    def answer(self, before: Sequence[Message], message: Message) -> str:
        """Return what the model samples for a message, with its end token. Raises Unrenderable."""
        opened, closed = self._rendered(before, begin=True), self._rendered([*before, message], begin=False)
        if not closed.startswith(opened):
            raise Unrenderable("the generation prompt opens what this answer does not begin with")
        body = closed[len(opened) :]
        if self.end and self.end in body:
            return body[: body.rindex(self.end) + len(self.end)]
        if not _CONTROL_END.search(body.rstrip()):
            raise Unrenderable("the template writes no end of a turn")
        return body.rstrip()

    def between(self, results: Sequence[Message]) -> str:
        """Return what stands between an answer's end token and the next answer: results of tools, or a user's message,
        and the generation prompt. As in TRL, after a call without arguments. Raises Unrenderable."""
        call = {"type": "function", "function": {"name": results[0].name or "dummy", "arguments": {}}}
        called: JsonObject = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered: JsonObject = {"role": "assistant", "content": _PLAIN}
        first = [{"role": "user", "content": "dummy"}, called if results[0].role == "tool" else answered]
        chats = [self._chat(result) for result in results]
        prefix, full = self._templated(first, begin=False), self._templated([*first, *chats], begin=True)
        if self.end and self.end in prefix:
            prefix = prefix[: prefix.rindex(self.end) + len(self.end)]
        if not full.startswith(prefix):
            raise Unrenderable("the template changes an answer once something follows it")
        suffix = full[len(prefix) :]
        for result in results:
            if result.text.strip() not in suffix:
                raise Unrenderable("a result is left out or changed")
        return suffix

    def _require_plain_text(self, messages: Sequence[Message]) -> None:
        """Raise Unrenderable where a text has a control token of the tokenizer, which would become that token."""
        for message in messages:
            texts = [message.text, message.reasoning, *(str(call.arguments) for call in message.tool_calls)]
            for token in self._control:
                if any(token in text for text in texts):
                    raise Unrenderable(f"a text has the control token {token!r}")

    def _require_kept(self, message: Message, segment: Segment, context: list[int]) -> None:
        """Raise Unrenderable unless TRL reads the message back from its tokens as it was."""
        if _has_parser(self.tokenizer):
            read = parse_response(self.tokenizer, segment.ids, prefix=context, tools=self._tools)
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in read.get("tool_calls") or ()]
            named = [(call.name, call.arguments) for call in message.tool_calls]
            expected = [(name, dict(arguments)) for name, arguments in named if isinstance(arguments, Mapping)]
            if calls != expected or len(expected) < len(message.tool_calls):
                raise Unrenderable("a call is left out or changed")
            thought = next((str(read[key]) for key in REASONING_KEYS if read.get(key)), "")
            if str(read.get("content") or "").strip() != message.text.strip():
                raise Unrenderable("the content is left out or changed")
            if thought.strip() != message.reasoning.strip():
                raise Unrenderable("the reasoning is left out or changed")
            return
        for what, text in (("content", message.text), ("reasoning", message.reasoning)):
            if text.strip() not in segment.text:
                raise Unrenderable(f"the {what} is left out or changed")
        for call in message.tool_calls:
            values = call.arguments.values() if isinstance(call.arguments, Mapping) else [call.arguments]
            if call.name not in segment.text or any(str(value) not in segment.text for value in values):
                raise Unrenderable("a call is left out or changed")

    def _end_of_turn(self) -> str:
        """Return what the template writes after an answer, without white space; empty if it writes nothing, or refuses
        a plain text."""
        question: JsonObject = {"role": "user", "content": "dummy"}
        answered: JsonObject = {"role": "assistant", "content": _PLAIN}
        try:
            return self._templated([question, answered], begin=False).partition(_PLAIN)[2].strip()
        except Unrenderable:
            return ""

    def _chat(self, message: Message) -> JsonObject:
        chat: JsonObject = {"role": message.role, "content": message.text}
        if message.reasoning:
            chat[self.reasoning_key] = message.reasoning
        if message.tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            chat["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return chat | ({"name": message.name} if message.name else {})

    def _rendered(self, messages: Sequence[Message], *, begin: bool) -> str:
        return self._templated([self._chat(message) for message in messages], begin=begin, tools=self._tools)

    def _templated(self, chats: Sequence[JsonObject], *, begin: bool, tools: Any = None) -> str:
        """Return the text of a template. Raises Unrenderable if it refuses the messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(chats), tools=tools, add_generation_prompt=begin, tokenize=False, **self._settings
            )
        except Exception as error:  # noqa: BLE001  (a template may raise anything)
            raise Unrenderable(f"the template refuses it: {type(error).__name__}: {error}") from None
        return str(text)

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def as_trained(tokenizer: Any) -> Any:
    """Return a tokenizer as TRL's trainer with tools has it: with a parser of its calls, and its template in the form
    that leaves earlier turns as they are. Raises ValueError for a template that TRL does not know."""
    trained = copy.deepcopy(tokenizer)
    if not _has_parser(trained):
        trained = add_response_schema(trained)
    if not is_chat_template_prefix_preserving(trained):
        trained.chat_template = get_training_chat_template(trained)
    return trained


def _has_parser(tokenizer: Any) -> bool:
    return any(getattr(tokenizer, key, None) is not None for key in ("response_template", "response_schema"))
