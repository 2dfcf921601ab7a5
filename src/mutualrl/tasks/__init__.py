"""Prompts and verifiers, one module a task."""

from __future__ import annotations

from mutualrl.errors import UsageError
from mutualrl.tasks.arithmetic import ArithmeticTask
from mutualrl.tasks.base import Split, Task, TaskSource
from mutualrl.tasks.dataset import DatasetTask
from mutualrl.tasks.math import MathTask

TASKS: dict[str, Task] = {task.name: task for task in (ArithmeticTask(), MathTask(), DatasetTask())}


def get_task(name: str) -> Task:
    """The task of that name. Raises UsageError naming those there are."""
    if name not in TASKS:
        raise UsageError(f"unknown task {name!r}; expected one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]


__all__ = ["TASKS", "Split", "Task", "TaskSource", "get_task"]
