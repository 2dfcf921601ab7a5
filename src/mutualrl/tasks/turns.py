"""Tools and environments in TRL's form, by import path: rollouts of several turns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mutualrl.errors import UsageError
from mutualrl.process.plugins import check_import_path, load_object
from mutualrl.tasks.base import TurnsSpec
from mutualrl.tasks.rewards import named_errors

Environment = Callable[[], Any]
Tool = Callable[..., Any]


def require_turns(environment: str | None, tools: Sequence[str]) -> None:
    """Raise UsageError if an environment or a tool does not exist, as far as can be checked without running code."""
    if environment is not None:
        check_import_path(environment, "task.environment", noun="class")
    for path in tools:
        check_import_path(path, "task.tools", noun="function")


def load_environment(path: str, *, owns_reward: bool) -> Environment:
    """Return the environment class (or another factory) of that name, for TRL's `environment_factory`. An exception of
    `reset` becomes a RewardError with the class's name.

    `owns_reward`: there is no reward function, so the environment must have `get_reward`. Raises UsageError for an
    object that TRL cannot use.
    """
    factory: Environment = load_object(path, "task.environment", noun="class")
    if not callable(factory):
        raise UsageError(f"task.environment: {path!r}: found {type(factory).__name__}, expected a class")
    if not isinstance(factory, type):  # another factory: TRL checks its instances
        return factory
    if not callable(getattr(factory, "reset", None)):
        raise UsageError(f"task.environment: {path!r} has no method reset; expected reset(self, **row)")
    if owns_reward and not callable(getattr(factory, "get_reward", None)):
        raise UsageError(
            f"task.environment: {path!r} has no method get_reward, and the recipe no task.reward; expected one of them"
        )
    return _with_named_errors(factory)


def load_tools(paths: Sequence[str]) -> list[Tool]:
    """Return the functions that a model may call. Raises UsageError for one without docstring or types, which
    describe it to the model."""
    tools = [load_object(path, "task.tools", noun="function") for path in paths]
    for path, tool in zip(paths, tools, strict=True):
        if not callable(tool):
            raise UsageError(f"task.tools: {path!r}: found {type(tool).__name__}, expected a function")
        untyped = [name for name, each in inspect.signature(tool).parameters.items() if each.annotation is each.empty]
        if untyped or not inspect.getdoc(tool):
            lacking = f"no type for {', '.join(untyped)}" if untyped else "no docstring"
            raise UsageError(
                f"task.tools: {path!r} has {lacking}; expected types and a docstring with its Args, which describe it "
                "to the model"
            )
    return tools


def visible_tools(tools: Sequence[Tool], environment: Environment | None) -> list[Tool]:
    """Return the tools described to a model: the functions, and those of an environment."""
    if environment is None:
        return list(tools)
    return [*tools, *methods_of(environment())]


def methods_of(environment: Any) -> list[Tool]:
    """Return the tools of an environment: its public methods but `reset` and `get_reward`, as TRL finds them."""
    methods = []
    for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            methods.append(getattr(environment, name))
    return methods


def template_of(turns: TurnsSpec | None, rewards: Sequence[str]) -> dict[str, list[Tool]]:
    """Return the argument of a chat template with a task's tools; none without any."""
    if turns is None:
        return {}
    factory = None if turns.environment is None else load_environment(turns.environment, owns_reward=not rewards)
    return {"tools": visible_tools(load_tools(turns.tools), factory)}


def _with_named_errors(environment: type) -> type:
    """Return a subclass whose `reset` raises RewardErrors that name the environment."""

    def reset(self: Any, **row: Any) -> Any:
        with named_errors(f"environment {environment.__name__}"):
            return environment.reset(self, **row)  # type: ignore[attr-defined]

    return type(environment.__name__, (environment,), {"reset": reset, "__module__": environment.__module__})
