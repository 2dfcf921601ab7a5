"""Tools and environments in TRL's form, by import path: rollouts of several turns."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mutualrl.console.lines import notify
from mutualrl.errors import RewardError, RunInterruptedError, UsageError
from mutualrl.process.limits import time_limit
from mutualrl.process.plugins import check_import_path, load_object
from mutualrl.process.user_code import LEAVING, PassingError, alone, contained, describe, interrupted
from mutualrl.records import Prompt
from mutualrl.tasks.base import CHARACTERS_PER_TOKEN, TurnsSpec
from mutualrl.tasks.rewards import asyncio_cancelled, callable_name, is_async, missing_columns, named_errors

Environment = Callable[[], Any]
Tool = Callable[..., Any]


def require_turns(environment: str | None, tools: Sequence[str]) -> None:
    """Raise UsageError if an environment or a tool does not exist, as far as can be checked without running code."""
    if environment is not None:
        check_import_path(environment, "task.environment", noun="class")
    for path in tools:
        check_import_path(path, "task.tools", noun="function")


def load_environment(path: str, *, owns_reward: bool, room: int | None = None) -> Environment:
    """Return the environment class (or another factory) of that name, for TRL's `environment_factory`. What its methods
    do is contained: an exception of `reset`, `get_reward` or its constructor becomes a RewardError with the class's
    name, and its tools are as those of `load_tools`.

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
    return _contained_class(factory, room)


def load_tools(paths: Sequence[str], room: int | None = None) -> list[Tool]:
    """Return the functions that a model may call. What they print goes to stderr; where one ends the process, or raises
    what is no Exception, the policy reads an error, as of any other; a result is text without lone surrogates, cut to
    what may fit.

    `room`: the most tokens of a completion (None: no limit). Raises UsageError for one without docstring or types,
    which describe it to the model, and for two of one name, of which a model could call one only.
    """
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
    _require_distinct([callable_name(tool) for tool in tools], "task.tools")
    return [_contained_tool(tool, room) for tool in tools]


def _require_distinct(names: Sequence[str], what: str) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(
            f"{what}: found two tools called {twice[0]!r}, of which a model could call one only; expected a name for "
            "each (rename a function)"
        )


def visible_tools(tools: Sequence[Tool], environment: Environment | None) -> list[Tool]:
    """Return the tools described to a model: the functions, and those of an environment."""
    if environment is None:
        return list(tools)
    return [*tools, *methods_of(environment())]


def methods_of(environment: Any) -> list[Tool]:
    """Return the tools of an environment: its public methods but `reset` and `get_reward`, as TRL finds them."""
    return [getattr(environment, name) for name in _tool_names(type(environment))]


def _tool_names(environment: type) -> list[str]:
    names = [name for name, _ in inspect.getmembers(environment, inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]


def template_of(turns: TurnsSpec | None, rewards: Sequence[str]) -> dict[str, list[Tool]]:
    """Return the argument of a chat template with a task's tools; none without any."""
    if turns is None:
        return {}
    factory = None if turns.environment is None else load_environment(turns.environment, owns_reward=not rewards)
    return {"tools": visible_tools(load_tools(turns.tools), factory)}


def try_turns(turns: TurnsSpec, rewards: Sequence[str], prompt: Prompt, timeout: float) -> None:
    """Load tools and environment, build the environment once and reset it with a row, before anything is sampled.
    Raises UsageError with the key for what TRL, or the first rollout, would be refused for."""
    from transformers.utils import get_json_schema

    tools = load_tools(turns.tools)
    where, visible = "task.tools", list(tools)
    instance = None
    if turns.environment is not None:
        where = f"task.environment: {turns.environment!r}"
        factory = load_environment(turns.environment, owns_reward=not rewards)
        late = UsageError(f"{where}: no progress for {timeout:g} s in building it or in its reset with the first row")
        try:
            with time_limit(timeout, late):
                instance = factory()
                if not callable(getattr(instance, "reset", None)):
                    raise UsageError(f"{where} returns an object without a method reset; expected reset(self, **row)")
                visible += methods_of(instance)
                content = prompt.content
                chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
                row = {"prompt": chat, **prompt.reward_columns}
                if lacking := missing_columns(instance.reset, row):
                    raise UsageError(
                        f"{where}: reset takes {', '.join(map(repr, lacking))}, of which the data have no column; "
                        f"expected some of: {', '.join(row)}"
                    )
                instance.reset(**row)
        except RewardError as error:
            raise UsageError(f"{where}: {error}; it was built and reset with the first row") from error
        _require_distinct([callable_name(tool) for tool in visible], where)
    for tool in visible:
        try:
            get_json_schema(tool)
        except Exception as error:
            raise UsageError(
                f"{where}: {callable_name(tool)!r} cannot be described to a model: {' '.join(str(error).split())[:300]}"
            ) from error


# ---- containment


def _contained_tool(tool: Tool, room: int | None) -> Tool:
    """Return a tool as TRL calls it: see `load_tools`."""
    name = callable_name(tool)
    most = None if room is None else CHARACTERS_PER_TOKEN * room
    if is_async(tool):

        async def call_later(*args: Any, **kwargs: Any) -> Any:
            with _errors_to_read(name):
                return _as_result(await tool(*args, **kwargs), name, most)

        call: Tool = call_later
    else:

        def call_now(*args: Any, **kwargs: Any) -> Any:
            with _errors_to_read(name):
                return _as_result(tool(*args, **kwargs), name, most)

        call = call_now
    functools.update_wrapper(call, tool)
    call.__name__ = name
    return call


@contextmanager
def _errors_to_read(name: str) -> Iterator[None]:
    """Run a tool: where it leaves, or raises what is no Exception, raise a RuntimeError, which the policy reads."""
    try:
        with contained(), alone(f"tool {name}"):
            yield
    except (Exception, RunInterruptedError, PassingError, asyncio_cancelled()):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and interrupted():
            raise
        if not isinstance(error, LEAVING):
            _say_once(name, f"tool {name} raised {type(error).__name__}, which is no Exception; the policy reads it")
        else:
            _say_once(name, f"tool {name} {describe(error)}; the policy reads that as an error")
        raise RuntimeError(describe(error)) from error


def _as_result(value: Any, name: str, most: int | None) -> Any:
    """Return a result as TRL shows it: a list of parts as it is, anything else as text that can be tokenized, of at
    most `most` characters."""
    if isinstance(value, list):
        return value
    text = str(value).encode("utf-8", "replace").decode()  # a lone surrogate becomes a question mark
    if most is None or len(text) <= most:
        return text
    _say_once(
        name,
        f"tool {name}: a result of {len(text):,} characters is cut to {most:,}; more cannot fit into a completion "
        "(trainer.max_completion_length)",
    )
    return f"{text[:most]} [... {len(text) - most} more characters]"


_SAID: set[tuple[str, str]] = set()


def _say_once(name: str, message: str) -> None:
    kind = message.partition(";")[0][:40]
    if (name, kind) not in _SAID:
        _SAID.add((name, kind))
        notify(message)


def _contained_class(environment: type, room: int | None) -> type:
    """Return a subclass whose methods are contained: see `load_environment`."""
    label = f"environment {environment.__name__}"

    def named(function: Tool) -> Tool:
        """Return a method whose errors name the environment."""
        if is_async(function):

            @functools.wraps(function)
            async def call_later(*args: Any, **kwargs: Any) -> Any:
                with contained(), named_errors(label), alone(label):
                    return await function(*args, **kwargs)

            return call_later

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with contained(), named_errors(label), alone(label):
                return function(*args, **kwargs)

        return call

    methods: dict[str, Any] = {"__module__": environment.__module__, "__qualname__": environment.__qualname__}
    for name in ("__init__", "reset", "get_reward"):
        if inspect.isfunction(function := getattr(environment, name, None)):
            methods[name] = named(function)
    for name in _tool_names(environment):
        static = isinstance(inspect.getattr_static(environment, name), staticmethod)
        tool = _contained_tool(getattr(environment, name), room)
        methods[name] = staticmethod(tool) if static else tool
    return type(environment.__name__, (environment,), methods)
