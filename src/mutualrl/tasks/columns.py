"""One table of the columns of rollouts that users hand in: their names, what they hold, and which a row must have.

Files of recorded texts (`sources.layouts`) have names of their own, since their ids and prompts are matched with a
task's: what is the second choice here may be the first one there. What a value says is read by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal

from mutualrl.tasks.run_reader import read_trajectory

#: spellings of a truth value in files without types, in lower case
TRUE, FALSE = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")


@dataclass(frozen=True, slots=True)
class FileColumn:
    """A column of users' rows. `names`: accepted in files, in order of preference. `read`: returns a value as the
    column's kind; raises ValueError for any other. `required`: a row without it is refused. `nullable`: a null says
    something, so that a row that has the column may have none. `texts`: it holds text, which nothing parses."""

    names: tuple[str, ...]
    expected: str
    read: Callable[[object], object]
    required: bool = False
    nullable: bool = True
    texts: bool = False

    def find(self, present: Collection[str]) -> str | None:
        """Return the name under which a file or row has the column; None if it has none."""
        return next((name for name in self.names if name in present), None)


def texts_of(value: object) -> list[str] | None:
    """Return the texts by which a prompt may be known: the text itself; of messages the user's last, if there is any,
    and all together. None for a value that is neither."""
    if isinstance(value, str):
        return [value]
    conversation = read_trajectory(value)
    if conversation is None:
        return None
    users = [message.text for message in conversation.messages if message.role == "user"]
    return [*users[-1:], "\n".join(message.text for message in conversation.messages)]


def truth_of(value: object) -> bool | None:
    """Return the truth value that a value spells; None if it spells none."""
    text = str(value).strip().lower() if isinstance(value, bool | int | float | str) else ""
    return True if text in TRUE else False if text in FALSE else None


def is_messages(value: object) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value)


def _string(value: object) -> str:
    """Return a text. A column of bytes, or of numbers where each is a text, has one, too: Parquet has types, and a
    tool may have chosen another."""
    if isinstance(value, bytes):
        value = value.decode()
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str):
        raise ValueError
    value.encode()  # a lone surrogate, which files and tokenizers cannot encode, is a ValueError
    return value


def _name(value: object) -> str:
    if not isinstance(value, str):  # a number is no name of a model
        raise ValueError
    return _string(value)


def _id(value: object) -> str:
    if is_messages(value):
        return _string((texts_of(value) or [""])[-1] or None)
    return _string(int(value) if isinstance(value, float) and value.is_integer() else value)


def _prompt(value: object) -> str:
    return _string(next(filter(None, texts_of(value) or []), None) if is_messages(value) else value)


def _response(value: object) -> str:
    conversation = read_trajectory(value) if is_messages(value) else None
    return _prompt(value) if conversation is None or conversation.prompt else _string(conversation.run.text)


def _number(value: object) -> float:
    if not isinstance(value, int | float | Decimal):
        raise ValueError
    return float(value)


def _count(value: object) -> int:
    """Return a non-negative integer; a file without integers, or whose column has nulls, may hold it as a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError
    return value


def _step(value: object) -> int:
    return _count(int(value) if isinstance(value, str) and value.isdecimal() else value)


def _truth(value: object) -> bool:
    if value not in (0, 1) or not isinstance(value, int):
        raise ValueError
    return bool(value)


def _counts(value: object) -> list[int]:
    return [_count(each) for each in _list(value)]


def _numbers(value: object) -> list[float]:
    return [_number(each) for each in _list(value)]


def _list(value: object) -> list[object]:
    if not isinstance(value, list) or any(isinstance(each, bool) for each in value):
        raise ValueError
    return value


#: columns of ids, and of texts that identify a prompt where there is none
IDS = ("prompt_id", "id", "example_id", "doc_id")
PROMPTS = ("prompt", "input")

#: by the name that a column has in this project's own files
COLUMNS: Mapping[str, FileColumn] = {
    "policy": FileColumn(("policy", "model"), "a string", _name, nullable=False, texts=True),
    "round": FileColumn(("round",), "a non-negative integer", _step),
    "prompt_id": FileColumn((*IDS, *PROMPTS), "a string or an integer", _id, required=True, nullable=False, texts=True),
    "rollout": FileColumn(("rollout",), "a non-negative integer", _count),
    "reward": FileColumn(("reward",), "a number", _number, required=True),
    "ended": FileColumn(("ended",), "true or false", _truth),
    "task": FileColumn(("task",), "a string", _string, texts=True),
    "group": FileColumn(("group",), "a string", _string, texts=True),
    "x_text": FileColumn(("x_text", *PROMPTS), "a string", _prompt, texts=True),
    "y_text": FileColumn(("y_text", "completion", "text", "output"), "a string", _response, texts=True),
    "tokens": FileColumn(("tokens",), "a non-negative integer", _count),
    "token_ids": FileColumn(("token_ids",), "a list of non-negative integers", _counts),
    "logprobs": FileColumn(("logprobs",), "a list of numbers", _numbers),
}
