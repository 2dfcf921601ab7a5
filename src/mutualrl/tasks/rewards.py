"""Reward functions in TRL's form: the built-in verifier, or any function by its import path."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mutualrl.errors import UsageError
from mutualrl.tasks.boxed import boxed_reward

Reward = Callable[..., Any]
IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.*\.py):(?P<name>[A-Za-z_]\w*)")
FORM = "expected 'boxed', 'package.module:function' or 'path/to/file.py:function'"


def load_reward(path: str) -> Reward:
    """The reward function of that name: `boxed` (exact match of the boxed answer), `package.module:function` (the
    working directory is searched last), or `file.py:function`.

    Loading a module runs it, as any import does. Raises UsageError naming what is missing.
    """
    if path == "boxed":
        return boxed_reward
    match = IMPORT_PATH.fullmatch(path)
    if match is None:
        raise UsageError(f"task.reward: found {path!r}, {FORM}")
    module = _import(match["module"], path)
    found = getattr(module, match["name"], None)
    if not callable(found):
        raise UsageError(f"task.reward: {match['module']!r} has no function {match['name']!r}")
    return found  # type: ignore[no-any-return]


def load_rewards(paths: str | Sequence[str]) -> list[Reward]:
    """The functions of one path, or of several."""
    return [load_reward(path) for path in ([paths] if isinstance(paths, str) else paths)]


def _import(name: str, path: str) -> Any:
    try:
        if not name.endswith(".py"):
            sys.path.append(str(Path.cwd()))  # last: nothing there hides an installed package
            try:
                return importlib.import_module(name)
            finally:
                sys.path.remove(str(Path.cwd()))
        file = Path(name).expanduser()
        spec = importlib.util.spec_from_file_location(f"mutualrl_reward_{file.stem}", file)
        if spec is None or spec.loader is None or not file.is_file():
            raise UsageError(f"task.reward: {path!r}: no such file: {file}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"task.reward: {path!r} cannot be imported: {type(error).__name__}: {error}") from error
