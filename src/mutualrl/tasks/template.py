"""Prompt templates: text in which `{field}` is replaced by a field of the row."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: the last line of the question in every task of the paper
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def fields_of(template: str) -> list[str]:
    """Return the fields named in a template. `{}`, as in `\\boxed{}`, is text."""
    return list(dict.fromkeys(_FIELD.findall(template)))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Fill every field of a template in one pass: braces in a value are kept. Raises KeyError for a missing field."""
    return _FIELD.sub(lambda match: values[match[1]], template)
