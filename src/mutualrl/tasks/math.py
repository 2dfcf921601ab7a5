r"""MATH (Hendrycks et al. 2021) from local JSON Lines rows with `problem` and `answer`.

Template (paper, Section "Prompt Templates"; design: the problem, an empty line, the common instruction).
The group of a problem is its subject. Without a validation file, a fixed share of the rows is held out.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path

from mutualrl.errors import DataError
from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskSource, read_jsonl, text_field, unicode_text

logger = logging.getLogger(__name__)

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
HELD_OUT_SHARE = 16  # one row in 16 is validation when no validation file is named


class MathTask:
    """Competition mathematics with exact match of the boxed answer."""

    name = "math"

    def load(self, split: Split, source: TaskSource) -> list[Prompt]:
        """Prompts of `split`: from the validation file where one is named, else the held-out share."""
        if source.data is None and (split == "train" or source.validation_data is None):
            raise DataError(
                "task 'math' needs a data file: add --data FILE, JSON Lines rows with 'problem' and 'answer'"
            )
        if source.validation_data is not None:
            path = source.data if split == "train" else source.validation_data
            assert path is not None
            return list(read_prompts(path, split))
        assert source.data is not None
        prompts = read_prompts(source.data, "train")
        return [p for p in prompts if _held_out(p.text) == (split == "validation")]


def _held_out(text: str) -> bool:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return digest[0] % HELD_OUT_SHARE == 0


@cache
def read_prompts(path: Path, split: str) -> tuple[Prompt, ...]:
    """The rows of a MATH file as prompts, in file order. Raises DataError for a row that does not fit.

    A row whose answer is an empty string is left out, with a warning that names it: an empty box would
    count as a success there. (Two rows of the original training set are such.)
    """
    prompts, empty = [], []
    for number, row in read_jsonl(path):
        text = f"{text_field(row, 'problem', path, number)}\n\n{INSTRUCTION}"
        if row.get("answer") == "":
            empty.append(number)
            continue
        answer = text_field(row, "answer", path, number)
        group = unicode_text(str(row.get("subject") or row.get("type") or "math"), "subject", path, number)
        row_id = unicode_text(str(row.get("unique_id") or number), "unique_id", path, number)
        prompts.append(Prompt(prompt_id("math", split, row_id, text), text, answer, group))
    if empty:
        named = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        logger.warning("%s: left out %d of %d rows, whose answer is empty: %s", path, len(empty), number, named)
    if not prompts:
        raise DataError(f"{path}: no row has an answer")
    return tuple(prompts)
