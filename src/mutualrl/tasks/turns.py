"""Tools and environments in TRL's form, by import path: rollouts of several turns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mutualrl.errors import UsageError
from mutualrl.plugins import load_object, require_there
from mutualrl.tasks.rewards import naming

#: what a regime that shares texts lacks for rollouts of several turns
NOT_SHARED = (
    "the exchange does not record which tokens of several turns were sampled and which a tool wrote, nor can the "
    "learner's chat template write a peer's turns again; leave it out, or take a regime that shares rewards alone"
)

Environment = Callable[[], Any]
Tool = Callable[..., Any]


def require_turns(environment: str | None, tools: Sequence[str]) -> None:
    """Raise UsageError where an environment or a tool does not exist, as far as is known without running code."""
    if environment is not None:
        require_there(environment, "task.environment", noun="class")
    for path in tools:
        require_there(path, "task.tools", noun="function")


def require_one_turn(environment: str | None, tools: Sequence[str], command: str) -> None:
    """Raise UsageError where a task has tools or an environment, and `command` samples one turn per prompt."""
    given = [f"task.tools {', '.join(tools)}"] if tools else []
    if environment is not None:
        given.insert(0, f"task.environment {environment}")
    if given:
        raise UsageError(
            f"found {' and '.join(given)}: {command} samples one turn per prompt, without tools; what a trained policy "
            "earns is the validation of its run (summary.json, mutualrl report)"
        )


def load_environment(path: str, *, owns_reward: bool) -> Environment:
    """Return the environment class (or another factory) of that name, for TRL's `environment_factory`. An exception of
    `reset` becomes a RewardError with the class's name.

    `owns_reward`: no reward function is given, so that the environment must have `get_reward`. Raises UsageError for
    what TRL could not use.
    """
    factory: Environment = load_object(path, "task.environment", noun="class")
    if not callable(factory):
        raise UsageError(f"task.environment: {path!r}: found {type(factory).__name__}, expected a class")
    if not isinstance(factory, type):  # another factory: TRL looks at what it makes
        return factory
    if not callable(getattr(factory, "reset", None)):
        raise UsageError(f"task.environment: {path!r} has no method reset; expected reset(self, **row)")
    if owns_reward and not callable(getattr(factory, "get_reward", None)):
        raise UsageError(
            f"task.environment: {path!r} has no method get_reward, and the recipe no task.reward; expected one of them"
        )
    return _with_named_errors(factory)


def load_tools(paths: Sequence[str]) -> list[Tool]:
    """Return the functions that a model may call. Raises UsageError for one that has no docstring or no types: the
    model is told of it by these."""
    tools = [load_object(path, "task.tools", noun="function") for path in paths]
    for path, tool in zip(paths, tools, strict=True):
        if not callable(tool):
            raise UsageError(f"task.tools: {path!r}: found {type(tool).__name__}, expected a function")
        untyped = [name for name, each in inspect.signature(tool).parameters.items() if each.annotation is each.empty]
        if untyped or not inspect.getdoc(tool):
            lacking = f"no type for {', '.join(untyped)}" if untyped else "no docstring"
            raise UsageError(
                f"task.tools: {path!r} has {lacking}; expected types and a docstring with its Args, which are what the "
                "model is told of it"
            )
    return tools


def told_tools(tools: Sequence[Tool], environment: Environment | None) -> list[Tool]:
    """Return what a model is told of: the functions, and the public methods of an environment but `reset` and
    `get_reward`, as TRL finds them."""
    if environment is None:
        return list(tools)
    instance = environment()
    methods = []
    for name, _ in inspect.getmembers(type(instance), inspect.isfunction):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            methods.append(getattr(instance, name))
    return [*tools, *methods]


def _with_named_errors(environment: type) -> type:
    """Return a subclass whose `reset` raises RewardErrors that name the environment."""

    def reset(self: Any, **row: Any) -> Any:
        with naming(f"environment {environment.__name__}"):
            return environment.reset(self, **row)  # type: ignore[attr-defined]

    return type(environment.__name__, (environment,), {"reset": reset, "__module__": environment.__module__})
