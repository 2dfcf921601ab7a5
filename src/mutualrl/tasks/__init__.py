"""Prompts and verifiers, one module a task."""

from __future__ import annotations

from mutualrl.errors import UsageError
from mutualrl.tasks.arithmetic import ArithmeticTask
from mutualrl.tasks.base import Split, Task, TaskData, TaskSource, load_prompts
from mutualrl.tasks.dataset import DatasetTask
from mutualrl.tasks.math import MATH_TASKS
from mutualrl.tasks.mixture import MixtureTask
from mutualrl.tasks.qa import QA_TASKS

_ALL: tuple[Task, ...] = (ArithmeticTask(), *MATH_TASKS, *QA_TASKS, DatasetTask(), MixtureTask())
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def get_task(name: str) -> Task:
    """The task of that name. Raises UsageError naming those there are."""
    if name not in TASKS:
        import difflib

        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(f"unknown task {name!r}; expected one of: {', '.join(sorted(TASKS))}{hint}")
    return TASKS[name]


__all__ = ["TASKS", "Split", "Task", "TaskData", "TaskSource", "get_task", "load_prompts"]
