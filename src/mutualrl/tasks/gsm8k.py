r"""GSM8K (Cobbe et al. 2021): rows with `question` and `answer`, whose last line is `#### NUMBER`.

Template as for MATH: the question, an empty line, the common instruction. The canonical answer is the number without
thousands separators. The worked solution is the rationale without its calculator annotations (`<<48/2=24>>`), ended by
the boxed number.
"""

from __future__ import annotations

import re

from mutualrl.tasks.hub_data import HubSource
from mutualrl.tasks.row_task import PromptFields, RowTask
from mutualrl.tasks.rows import DatasetRow
from mutualrl.tasks.template import INSTRUCTION

_FINAL = re.compile(r"\n?#### *(?P<number>-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*\Z")
_ANNOTATION = re.compile(r"<<[^<>]*>>")


def _gsm8k(row: DatasetRow, part: str) -> PromptFields:
    """Return the prompt of a problem."""
    rationale = row.text("answer")
    final = _FINAL.search(rationale)
    if final is None:
        row.refuse("answer", rationale[-80:], "a solution whose last line is #### NUMBER")
    number = final["number"].replace(",", "")
    steps = _ANNOTATION.sub("", rationale[: final.start()])
    return PromptFields(
        f"{row.text('question')}\n\n{INSTRUCTION}", number, "gsm8k", solution=f"{steps}\n\\boxed{{{number}}}"
    )


GSM8K_TASK = RowTask("gsm8k", (HubSource("openai/gsm8k", "main"),), _gsm8k, ("question", "answer"), ("gsm8k",), "gsm8k")
