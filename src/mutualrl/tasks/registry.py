"""The tasks by name."""

from __future__ import annotations

import difflib
from functools import cache

from mutualrl.errors import TaskError
from mutualrl.process.plugins import FORM, entry_points, is_import_path, load_object
from mutualrl.tasks.addition_chain import AdditionChainTask
from mutualrl.tasks.arithmetic import ArithmeticTask
from mutualrl.tasks.base import Task
from mutualrl.tasks.calculator import CalculatorTask
from mutualrl.tasks.countdown import COUNTDOWN_TASKS
from mutualrl.tasks.dataset import DatasetTask
from mutualrl.tasks.gsm8k import GSM8K_TASK
from mutualrl.tasks.math import MATH_TASKS
from mutualrl.tasks.mixture import MixtureTask
from mutualrl.tasks.qa import QA_TASKS

GROUP = "mutualrl.tasks"
_GENERATED: tuple[Task, ...] = (ArithmeticTask(), *COUNTDOWN_TASKS, AdditionChainTask(), CalculatorTask())
_SINGLE: tuple[Task, ...] = (*_GENERATED, *MATH_TASKS, GSM8K_TASK, *QA_TASKS, DatasetTask())
TASKS: dict[str, Task] = {task.name: task for task in _SINGLE}
TASKS["mixture"] = MixtureTask(dict(TASKS))


@cache
def get_task(name: str) -> Task:
    """Return the task of that name, import path or entry point.

    Raises TaskError, with file and line for an object that cannot be imported or is not a task, with the known names
    for an unknown one.
    """
    if name in TASKS:
        return TASKS[name]
    if is_import_path(name):
        return _checked(load_object(name, "task", TaskError), name)
    plugins = entry_points(GROUP)
    if name in plugins:
        return _checked(load_object(plugins[name].value, f"task {name!r}", TaskError), name)
    known = sorted({*TASKS, *plugins})
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise TaskError(f"unknown task {name!r}; expected one of: {', '.join(known)}{hint}; or {FORM}")


def _checked(task: object, name: str) -> Task:
    expected = {"name": str, "max_new_tokens": int, "takes_data": bool, "reads": str}
    for attribute, kind in expected.items():
        if not isinstance(value := getattr(task, attribute, None), kind):
            raise TaskError(f"task {name!r}: {attribute}: found {value!r}, expected {kind.__name__}")
    if not isinstance(task, Task):
        raise TaskError(f"task {name!r}: found {type(task).__name__}, expected read(split, source)")
    return task
