"""Prompt templates: text in which `{field}` is replaced by a field of the row."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: the line that every task of the paper ends its question with
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def fields_of(template: str) -> list[str]:
    """The fields that a template names. `{}`, as in `\\boxed{}`, is text."""
    return list(dict.fromkeys(_FIELD.findall(template)))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the template with every field filled in, in one pass: braces in a value stay as they are. Raises
    KeyError."""
    return _FIELD.sub(lambda match: values[match[1]], template)
