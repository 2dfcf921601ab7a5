r"""Verifier: exact match of the last balanced `\boxed{...}` with the canonical label.

Source: paper, Section "Experimental Setup", Benchmarks: "extract the final answer between the outermost
\boxed{} tokens, and compare this string exactly against the canonical label". Text outside the box is
ignored, and model output is never evaluated as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from numbers import Number

# `\{` and `\}` are literal braces in LaTeX, not grouping: `\boxed{\{1, 2\}}` contains a set.
# `\\` is a line break, whatever brace follows it, unless it is a box after a stray backslash.
_TOKEN = re.compile(r"\\boxed\{|\\\\(?!boxed\{)|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{...}` of `text`, or None if there is none. Linear time.

    Of nested boxes, the outermost balanced one counts; an unclosed box is skipped.
    """
    open_braces: list[int] = []  # start of the content for a box, -1 for a plain brace
    span: tuple[int, int] | None = None
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(-1)
        elif token == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                span = (start, match.start())
        elif token[1] == "b":
            open_braces.append(match.end())
    return None if span is None else text[span[0] : span[1]]


def final_answer(text: str) -> str:
    r"""Return a solution's final answer: the content of its last `\boxed{...}`, else its last line with text."""
    boxed = last_boxed(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return boxed if boxed is not None else lines[-1] if lines else ""


def boxed_score(completion: str, answer: str) -> float:
    """Return 1.0 when the boxed content equals `answer` as a string (outer whitespace stripped), else 0.0."""
    return content_score(last_boxed(completion), answer)


def content_score(content: str | None, answer: str) -> float:
    """Return the score of a box's content, as `boxed_score` does; None: no box."""
    return float(content is not None and content.strip() == answer.strip())


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion in TRL's form: a string, or the messages of a conversation, of which only the
    assistant's count: a tool's result is not the model's answer."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion if message["role"] == "assistant")


def answer_text(label: object) -> str:
    """Return the text that the box must contain for an answer: a string unchanged, a number as Python writes it, any
    other value as JSON (`true`, `[1, 2]`). Raises TypeError or ValueError for a value that is not JSON."""
    if isinstance(label, str):
        return label
    if isinstance(label, Number) and not isinstance(label, bool):
        return str(label)
    return json.dumps(label, ensure_ascii=False, allow_nan=False)


def boxed_reward(completions: list[str | list[dict[str, str]]], answer: Sequence[object], **_: object) -> list[float]:
    """Return the `boxed_score` of each completion with the data column `answer`: a reward function in TRL's form."""
    return [boxed_score(completion_text(c), answer_text(a)) for c, a in zip(completions, answer, strict=True)]
