"""Reward functions in TRL's form: the built-in verifier, or any function by its import path."""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import isnan
from pathlib import Path
from typing import Any

from mutualrl.errors import RewardError, UsageError
from mutualrl.plugins import check_import_path, is_import_path, load_object
from mutualrl.process.limits import time_limit
from mutualrl.tasks.boxed import boxed_reward

Reward = Callable[..., Any]
FORM = "expected 'boxed', 'package.module:function' or 'path/to/file.py:function'"


def load_reward(path: str) -> Reward:
    """Return the reward function of that name: `boxed` (exact match of the boxed answer), `package.module:function`
    (the working directory is searched last), or `file.py:function`.

    Loading a module runs it, as any import does. Raises UsageError naming what is missing.
    """
    if path == "boxed":
        return boxed_reward
    if not is_import_path(path):
        raise UsageError(f"task.reward: found {path!r}, {FORM}")
    function: Reward = load_object(path, "task.reward", noun="function")
    if not callable(function):
        raise UsageError(f"task.reward: {path!r}: found {type(function).__name__}, expected a function")
    return function


def require_rewards(paths: str | Sequence[str]) -> None:
    """Raise UsageError if a reward function does not exist, as far as can be checked without running code."""
    for path in [paths] if isinstance(paths, str) else paths:
        check_import_path(path, "task.reward", noun="function")


def load_rewards(paths: str | Sequence[str]) -> list[Reward]:
    """Return the reward functions of one path, or of several."""
    return [load_reward(path) for path in ([paths] if isinstance(paths, str) else paths)]


def wrap_errors(function: Reward, name: str, on_call: Callable[[str], None] = lambda name: None) -> Reward:
    """Wrap `function` to raise RewardErrors with its name, caused by the original exceptions; `on_call` is called
    before each call. `__wrapped__` is the original function. Not for reward models, which TRL calls differently."""
    if is_async(function):

        @functools.wraps(function)
        async def later(*args: object, **kwargs: object) -> Any:
            on_call(name)
            with named_errors(f"reward function {name}"):
                return await function(*args, **kwargs)

        return later

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        on_call(name)
        with named_errors(f"reward function {name}"):
            return function(*args, **kwargs)

    return call


def is_async(function: Reward) -> bool:
    """Return whether calling a function, a partial of one, or an object returns a coroutine, by TRL's rule."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Convert an exception of the user's code to a RewardError that names the function and the line."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise RewardError(f"{what}: {type(error).__name__}: {error} ({where})") from error


def weighted(
    functions: Sequence[Reward],
    names: Sequence[str],
    weights: Sequence[float],
    given: dict[str, Any],
    count: int,
    timeout: float | None = None,
) -> list[float]:
    """Return the weighted sum of reward functions for `count` completions, each called as in TRL; None and NaN count
    as 0.

    `given`: the keyword arguments of every call. `timeout`: limit of a call in seconds. Raises RewardError with the
    function's name.
    """
    total = [0.0] * count
    for function, name, weight in zip(functions, names, weights, strict=True):
        try:
            values = [0.0 if value is None else float(value) for value in _call(function, name, given, timeout)]
        except (TypeError, ValueError) as error:
            raise RewardError(f"reward function {name}: {type(error).__name__}: {error}") from error
        if len(values) != count:
            raise RewardError(
                f"reward function {name}: {len(values)} rewards for {count} completions, expected one each"
            )
        total = [t + weight * (0.0 if isnan(v) else v) for t, v in zip(total, values, strict=True)]
    return total


def _call(function: Reward, name: str, arguments: dict[str, Any], timeout: float | None) -> Any:
    """Call a reward function, and await it if it is asynchronous."""
    late = RewardError(f"reward function {name}: no progress for {timeout or 0:g} s")
    with nullcontext() if timeout is None else time_limit(timeout, late):
        result = function(**arguments)
        return asyncio.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(value: Awaitable[Any]) -> Any:
    return await value
