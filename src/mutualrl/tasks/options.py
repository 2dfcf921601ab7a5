"""Options of every command that reads the rows of one task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mutualrl.console.options import Option


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Rows of a task, and how their prompts are built; None: the task's own."""

    data: Annotated[Path | None, Option("The rows of one task: a file, a directory, or hub:OWNER/NAME.")] = None
    template: Annotated[str | None, Option("Task dataset: prompt template, {field} for a field of the row.")] = None
    answer: Annotated[str | None, Option("Task dataset: field of the answer (answer).")] = None
