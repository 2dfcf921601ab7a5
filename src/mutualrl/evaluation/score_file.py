"""Scoring of existing completions: rows of `{"completion", "answer"}`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mutualrl.console.markdown import number, table
from mutualrl.console.user_path import user_path
from mutualrl.errors import DataError
from mutualrl.evaluation.verify import verified
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.boxed import boxed_score, last_boxed
from mutualrl.tasks.rows import DatasetRow, read_rows
from mutualrl.tasks.scoring import breakdown, standard_error

_COMPLETION = ("completion", "y_text")  # the second is the column of an evaluation's own files


def score_file(path: Path, also: tuple[str, ...], console: Console) -> JsonObject:
    """Return `{"n", "correct", "accuracy", "stderr", "no_box"}` of a file's rows, `no_box` as a fraction; with a
    string field `group` also `"groups"`, with `math-verify` also `"math_verify"` and `"unverified"`, its number of
    undecided answers.

    Raises DataError naming file, row and field; no row is skipped.
    """
    file = user_path(path)
    completions, answers, groups = [], [], []
    for place, values in read_rows(file):
        row = DatasetRow(values, str(file), place)
        field = next((name for name in _COMPLETION if name in values), _COMPLETION[0])
        text, answer = row.take(field), row.take("answer")
        if not isinstance(text, str):
            row.refuse(field, text, "a string")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            row.refuse("answer", answer, "a string")
        if not str(answer).strip():
            row.refuse("answer", answer, "an answer: an empty box would count as correct")
        completions.append(text)
        answers.append(str(answer))
        groups.append(values.get("group"))
    if not completions:
        raise DataError(f"{file}: the file has no rows")
    hits = [boxed_score(text, answer) for text, answer in zip(completions, answers, strict=True)]
    result: JsonObject = {
        "n": len(hits),
        "correct": int(sum(hits)),
        "accuracy": sum(hits) / len(hits),
        "stderr": standard_error(hits),
        "no_box": sum(last_boxed(text) is None for text in completions) / len(hits),
    }
    if all(isinstance(group, str) for group in groups):
        result["groups"] = breakdown([str(group) for group in groups], hits)
    if "math-verify" in also:
        result["math_verify"] = verified(list(zip(completions, answers, strict=True)), console)
        result["unverified"] = result["math_verify"]["unverified"]
    return result


def markdown(result: JsonObject, path: Path) -> str:
    """Return the table of a scored file."""
    head = ["score", "n", "correct", "accuracy", "standard error", "no box", "unverified"]
    rows = [
        [
            "exact match",
            str(result["n"]),
            str(result["correct"]),
            number(result["accuracy"]),
            number(result["stderr"]),
            number(result["no_box"]),
            "",
        ]
    ]
    if (lenient := result.get("math_verify")) is not None:
        rows.append(
            [
                "math-verify",
                str(lenient["n"]),
                str(lenient["correct"]),
                number(lenient["accuracy"]),
                "",
                "",
                str(lenient["unverified"]),
            ]
        )
    return table(f"completions of {path.name}", head, rows)
