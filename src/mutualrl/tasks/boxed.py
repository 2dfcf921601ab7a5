r"""Verifier: exact match of the last balanced `\boxed{...}` with the canonical label.

Source: paper, Section "Experimental Setup", Benchmarks: "extract the final answer between the outermost
\boxed{} tokens, and compare this string exactly against the canonical label". Text outside the box is
ignored, and nothing that a model wrote is ever evaluated.
"""

from __future__ import annotations

import re

# `\{` and `\}` are printed braces in LaTeX, not grouping: `\boxed{\{1, 2\}}` holds a set.
# `\\` is a line break there, whatever brace follows it, unless it is a box behind a stray backslash.
_TOKEN = re.compile(r"\\boxed\{|\\\\(?!boxed\{)|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Return content of the last balanced `\boxed{...}` of `text`, or None when there is none. Linear in the
    length.

    Of nested boxes the outermost balanced one counts; a box that never closes is skipped.
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


def boxed_score(completion: str, answer: str) -> float:
    """Return 1.0 when the boxed content equals `answer` as a string (outer whitespace stripped), else 0.0."""
    return content_score(last_boxed(completion), answer)


def content_score(content: str | None, answer: str) -> float:
    """Return the same for the content of a box, None where there was none."""
    return float(content is not None and content.strip() == answer.strip())


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return text of a completion as TRL hands it out: a string, or the messages of a conversation, of which those
    count that the model wrote: what a tool answered is no answer of the model's."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion if message["role"] == "assistant")


def boxed_reward(completions: list[str | list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """Return TRL reward function: `boxed_score` of every completion against the data column `answer`."""
    return [boxed_score(completion_text(c), a) for c, a in zip(completions, answer, strict=True)]
