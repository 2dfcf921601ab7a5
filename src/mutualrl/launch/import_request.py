"""Request of an exchange of recorded texts, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import Option, OptionGroup, WithJson
from mutualrl.recipes.request import Request


@dataclass(frozen=True, kw_only=True)
class ImportRequest(WithJson):
    """Make an exchange of a file: its texts for the task's prompts, verified by the task's reward.

    Example: mutualrl exchange import openr1.parquet --out expert --task dataset --data math_train.jsonl
    """

    file: Annotated[str, Option("Recorded texts: a file, a directory, or hub:OWNER/NAME.", argument=True)]
    out: Annotated[Path, Option("Directory of the new exchange.")]
    name: Annotated[str, Option("Name of the member that has the texts.")] = "recorded"
    asked: Annotated[Request, OptionGroup("task", "data", "assignments")] = Request()
    model: Annotated[str | None, Option("The model to train, for a reward function of your own.")] = None
