"""Prompts and verifiers, one module per task.

A custom task is `TASK` in a file or package (`--task file.py:TASK`, `--task package.module:TASK`), or an entry point of
an installed package in the group `mutualrl.tasks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.imported import on_first_use

if TYPE_CHECKING:
    from mutualrl.tasks.base import Split, Task, TaskData, TaskSource, load_prompts
    from mutualrl.tasks.registry import TASKS, get_task

__all__ = ["TASKS", "Split", "Task", "TaskData", "TaskSource", "get_task", "load_prompts"]
__getattr__ = on_first_use(
    __name__,
    {"base": ("Split", "Task", "TaskData", "TaskSource", "load_prompts"), "registry": ("TASKS", "get_task")},
)
