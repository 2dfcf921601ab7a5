"""Request of a new project, which is the options of `init`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import TRUST_REMOTE_CODE, Option, OptionGroup, WithJson
from mutualrl.recipes.request import Request

#: what a project asks of its recipe, as `train` does
_ASKED = {
    "models": Option("A model: a directory, a hub id, or NAME=MODEL. Two, or one and a source.", "--model"),
    "sources": Option("Recorded texts, a served or a frozen model.", "--source", metavar="NAME=recorded:FILE"),
    "assignments": Option(
        "A key of pool.yaml: task.hold_out=0.25, sources.NAME.columns.text=COLUMN. Repeatable.",
        "--set",
        metavar="KEY=VALUE",
    ),
    "task": Option("Task to train on (`tasks ls`)."),
    "data": Option("Your own rows instead, with prompt and answer: JSON Lines, CSV, Parquet."),
}


@dataclass(frozen=True, kw_only=True)
class ProjectRequest(WithJson):
    """Write pool.yaml, reward.py and a README for your own models and data, after checking all of them.

    Asks for missing options. Never overwrites a file.
    Example: mutualrl init my-run --model ./a --model ./b --data rows.jsonl --reward own
    """

    directory: Annotated[Path, Option("Directory for the files; created if missing.", argument=True)] = Path()
    asked: Annotated[Request, OptionGroup(*_ASKED, **_ASKED)] = Request()
    prompt_column: Annotated[str | None, Option("Column with the prompt, if it is not `prompt`.")] = None
    answer_column: Annotated[str | None, Option("Column with the answer, if it is not `answer`.")] = None
    template: Annotated[str | None, Option("Prompt built from columns: 'Question: {question}'.")] = None
    reward: Annotated[str | None, Option("boxed, own (a reward.py to edit), or FILE.py:FUNCTION.")] = None
    gpus: Annotated[int | None, Option("Number of GPUs to train on (all of this machine).", min=0)] = None
    max_completion_length: Annotated[
        int | None, Option("Maximum completion length in tokens (64 on the CPU, 512 on GPUs).", min=1)
    ] = None
    yes: Annotated[bool, Option("No questions: use defaults for missing options.")] = False
    no_check: Annotated[bool, Option("Write the files without checking models, data and placement.")] = False
    accept_unsafe: Annotated[bool, Option("Write the files although two tokenizers are unsafe together.")] = False
    trust_remote_code: Annotated[bool, TRUST_REMOTE_CODE] = False
