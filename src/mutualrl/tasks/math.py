r"""MATH (Hendrycks et al. 2021): rows with `problem` and `answer`, or with a `solution` whose last box is the answer.

Template (paper, Section "Prompt Templates"; design: the problem, an empty line, the common instruction).
The group of a problem is its subject, its level a facet. `math` has the 5,000 test problems, `math500` the 500 of them
drawn by Lightman et al. (2023).
"""

from __future__ import annotations

import re
from pathlib import Path

from mutualrl.tasks.base import unicode_text
from mutualrl.tasks.boxed import last_boxed
from mutualrl.tasks.hub_data import HubSource
from mutualrl.tasks.row_task import PromptFields, RowTask
from mutualrl.tasks.rows import DatasetRow
from mutualrl.tasks.template import INSTRUCTION

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_OLD_BOX = re.compile(r"\\(?:boxed|fbox)(?:\{|\s+(?P<bare>[^\s$.]+))")


def _math(row: DatasetRow, part: str) -> PromptFields | str:
    """Return the prompt of a problem, or why the row is dropped: with an empty answer (two rows of the original
    training set), an empty box would count as correct."""
    problem = row.text("problem")
    if row.values.get("answer") == "":
        return "its answer is empty"
    answer = row.text("answer") if "answer" in row.values or "solution" not in row.values else _boxed(row)
    if not answer.strip():
        return "the box of its solution is empty"
    group = row.values.get("subject") or row.values.get("type") or "math"
    if not isinstance(group, str):
        row.refuse("subject", group, "a string")
    facets = {}
    if row.values.get("level") is not None:
        level = unicode_text(str(row.values["level"]), "level", Path(row.where), row.number)
        facets["level"] = level.removeprefix("Level ")
    gold = row.values.get("solution")
    solution = row.text("solution") if isinstance(gold, str) and gold.strip() else None
    return PromptFields(
        f"{problem}\n\n{INSTRUCTION}",
        answer,
        unicode_text(group, "subject", Path(row.where), row.number),
        facets,
        solution,
    )


def _boxed(row: DatasetRow) -> str:
    """Return the answer in a gold solution: its last box. Some old solutions write `\\boxed 7` or `\\fbox{7}`."""
    solution = row.text("solution")
    boxes = list(_OLD_BOX.finditer(solution))
    if not boxes:
        row.refuse("solution", solution[-80:], "a solution that ends in \\boxed{answer}")
    if (bare := boxes[-1]["bare"]) is not None:
        return bare
    answer = last_boxed(solution.replace("\\fbox{", "\\boxed{"))
    return "" if answer is None else answer


MATH_TASKS = (
    RowTask(
        "math",
        tuple(HubSource("EleutherAI/hendrycks_math", subject) for subject in SUBJECTS),
        _math,
        ("problem",),
        ("math",),
        "math",
        stand_in="math500",
        id_field="unique_id",
    ),
    RowTask(
        "math500",
        (HubSource("HuggingFaceH4/MATH-500"),),
        _math,
        ("problem",),
        ("math500",),
        "math500",
        id_field="unique_id",
    ),
)
