"""Reward functions in TRL's form: the built-in verifier, or any function by its import path."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mutualrl.console.lines import notify
from mutualrl.errors import RewardError, RunInterruptedError, UsageError
from mutualrl.process import user_code
from mutualrl.process.limits import time_limit
from mutualrl.process.plugins import check_import_path, is_import_path, load_object
from mutualrl.process.user_code import PassingError, contained, describe, own_state
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.tasks.section import REWARD_FORM

Reward = Callable[..., Any]


def load_reward(path: str) -> Reward:
    """Return the reward function of that name: `boxed` (exact match of the boxed answer), `package.module:function`
    (the working directory is searched last), or `file.py:function`.

    Loading a module runs it, as any import does. Raises UsageError naming what is missing.
    """
    if path == "boxed":
        return boxed_reward
    if not is_import_path(path):
        raise UsageError(f"task.reward: found {path!r}, {REWARD_FORM}")
    function: Reward = load_object(path, "task.reward", noun="function")
    if not callable(function):
        raise UsageError(f"task.reward: {path!r}: found {type(function).__name__}, expected a function")
    return function


def require_rewards(paths: str | Sequence[str]) -> None:
    """Raise UsageError if a reward function does not exist, as far as can be checked without running code."""
    for path in [paths] if isinstance(paths, str) else paths:
        check_import_path(path, "task.reward", noun="function")


def load_rewards(paths: str | Sequence[str]) -> list[Reward]:
    """Return the reward functions of one path, or of several, adapted (`adapt`), each under a name of its own.

    A function has TRL's name for it; of several with one name (partials of one function, or two files), each has the
    name in its path, after its file's or module's if those are the same, too. Raises UsageError for a path given twice.
    """
    listed = [paths] if isinstance(paths, str) else list(paths)
    if repeated := sorted({path for path in listed if listed.count(path) > 1}):
        raise UsageError(f"task.reward: {repeated[0]!r} is listed twice; list it once (trainer.reward_weights)")
    functions = [load_reward(path) for path in listed]
    names = [callable_name(function) for function in functions]
    for longer in (_short_name, _long_name, str):
        names = [longer(path) if names.count(name) > 1 else name for name, path in zip(names, listed, strict=True)]
    return [adapt(function, name) for function, name in zip(functions, names, strict=True)]


def _short_name(path: str) -> str:
    return path.rpartition(":")[2]


def _long_name(path: str) -> str:
    module, _, name = path.rpartition(":")
    return f"{Path(module).stem if module.endswith('.py') else module}.{name}" if module else name


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names for metrics: of several equal ones, each with its number (`constant 1`, `constant 2`)."""
    counted: Counter[str] = Counter()
    distinct = []
    for name in names:
        counted[name] += 1
        distinct.append(f"{name} {counted[name]}" if names.count(name) > 1 else name)
    return distinct


def callable_name(function: Reward) -> str:
    """Return TRL's name of a reward function: that of the function in a partial, of the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def adapt(
    function: Reward,
    name: str,
    on_call: Callable[[str], None] = lambda name: None,
    on_return: Callable[[], None] = lambda: None,
) -> Reward:
    """Return the function as everything here calls it, in training, dry run, evaluation and diagnostics.

    It returns one float or None per completion; NaN and infinite rewards are None (unscorable), with a warning. What it
    prints goes to stderr. Raises RewardError, with its name and the cause, if it raises, leaves (`sys.exit`,
    `os._exit`), or returns anything else. `on_call` is called before each call, `on_return` after it returned. Not for
    reward models, which TRL calls differently.
    """
    if is_async(function):

        async def call_later(*args: object, **kwargs: Any) -> list[float | None]:
            on_call(name)
            with _contained(f"reward function {name}"):
                values = await function(*args, **kwargs)
                on_return()
                return _checked(values, name, len(kwargs["completions"]))

        call: Reward = call_later
    else:

        def call_now(*args: object, **kwargs: Any) -> list[float | None]:
            on_call(name)
            with _contained(f"reward function {name}"):
                with own_state():
                    values = function(*args, **kwargs)
                on_return()
                return _checked(values, name, len(kwargs["completions"]))

        call = call_now
    call.__name__ = name
    call.original = original(function)  # type: ignore[attr-defined]
    return call


def original(function: Reward) -> Reward:
    """Return the function that `adapt` adapted; any other function unchanged."""
    inner: Reward = getattr(function, "original", function)
    return inner


#: what TRL gives a reward function or a reset beside the columns of the data
_GIVEN = frozenset(
    ("prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra", "log_metric")
)


def missing_columns(function: Reward, columns: Collection[str]) -> list[str]:
    """Return the parameters that a function must be given, and neither TRL nor the data have; none of a function whose
    parameters are not known."""
    try:
        parameters = inspect.signature(original(function)).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [each.name for each in named if each.default is each.empty]
    return [name for name in needed if name not in _GIVEN and name not in columns]


def require_columns(functions: Sequence[Reward], columns: Collection[str]) -> None:
    """Raise UsageError naming the columns that reward functions take and the data lack, all together."""
    lacking = {name: callable_name(each) for each in functions for name in missing_columns(each, columns)}
    if not lacking:
        return
    takers = ", ".join(dict.fromkeys(lacking.values()))
    raise UsageError(
        f"task.reward: {takers} takes {', '.join(map(repr, lacking))}, of which the data have no column; expected some "
        f"of: {', '.join(columns)}, or a default value"
    )


def is_async(function: Reward) -> bool:
    """Return whether calling a function, a partial of one, or an object returns a coroutine, by TRL's rule."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@contextmanager
def _contained(what: str) -> Iterator[None]:
    """Run user code: its prints go to stderr, its exceptions and exits become RewardErrors."""
    with contained(), named_errors(what):
        yield


def asyncio_cancelled() -> type[BaseException]:
    """Return asyncio's error of a cancelled task, if asyncio is in use."""
    asyncio = sys.modules.get("asyncio")
    return PassingError if asyncio is None else asyncio.CancelledError


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Convert an exception of the user's code, also SystemExit, to a RewardError that names the function and the
    line."""
    try:
        yield
    except (RunInterruptedError, RewardError, PassingError, asyncio_cancelled()):  # a signal's, or already named
        raise
    except BaseException as error:  # also one of the user's own that is no Exception
        if isinstance(error, KeyboardInterrupt) and user_code.interrupted():
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != user_code.__file__]
        where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        raise RewardError(f"{what}: {describe(error)} ({where})") from error


def _checked(values: object, name: str, count: int) -> list[float | None]:
    """Return the rewards that a function returned as floats, None for one that cannot be used. Raises RewardError."""
    if hasattr(values, "tolist"):  # a tensor or an array
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RewardError(f"reward function {name}: returned {_shown(values)}, expected a list of {count} numbers")
    listed = list(values)
    if len(listed) != count:
        raise RewardError(f"reward function {name}: {len(listed)} rewards for {count} completions, expected one each")
    rewards = [_number(value, name, place) for place, value in enumerate(listed)]
    unusable = [
        _shown(value) for value, reward in zip(listed, rewards, strict=True) if reward is None and value is not None
    ]
    if unusable and name not in _WARNED:
        _WARNED.add(name)
        notify(
            f"reward function {name}: returned {unusable[0]} for {len(unusable)} of {count} completions; expected a "
            "finite number, or None: such completions count as unscorable"
        )
    return rewards


_WARNED: set[str] = set()  # functions that returned rewards that are not finite
LARGEST = 3.4e38  # of a float32, in which TRL computes


def _number(value: object, name: str, place: int) -> float | None:
    """Return a reward as a float; None for None, NaN and what is infinite in float32."""
    if hasattr(value, "item"):  # a scalar tensor or NumPy number
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise RewardError(
            f"reward function {name}: returned {_shown(value)} for completion {place}, expected a number or None"
        )
    return float(value) if abs(value) <= LARGEST else None


def _shown(value: object) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


def weighted(
    functions: Sequence[Reward],
    names: Sequence[str],
    weights: Sequence[float],
    given: dict[str, Any],
    timeout: float | None = None,
) -> list[float]:
    """Return the weighted sum of adapted reward functions, each called as in TRL, over those that returned a number;
    NaN (unscorable) where none did.

    `given`: the keyword arguments of every call. `timeout`: limit of a call in seconds. Raises RewardError with the
    function's name.
    """
    total = [math.nan] * len(given["completions"])
    for function, name, weight in zip(functions, names, weights, strict=True):
        for place, value in enumerate(_call(function, name, given, timeout)):
            if value is not None:
                total[place] = weight * value + (0.0 if math.isnan(total[place]) else total[place])
    return total


def _call(function: Reward, name: str, arguments: dict[str, Any], timeout: float | None) -> list[float | None]:
    """Call a reward function, and await it if it is asynchronous."""
    late = RewardError(f"reward function {name}: no progress for {timeout or 0:g} s")
    with nullcontext() if timeout is None else time_limit(timeout, late):
        result = function(**arguments)
        values: list[float | None] = _awaited(result) if inspect.isawaitable(result) else result
        return values


def _awaited(value: Awaitable[list[float | None]]) -> list[float | None]:
    import asyncio  # a twentieth of a second, which every error of a recipe would wait for

    async def result() -> list[float | None]:
        return await value

    return asyncio.run(result())
