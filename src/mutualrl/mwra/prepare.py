"""Embedded models that the cache does not have are made before the run, one process each, side by side."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mutualrl.errors import MutualRLError
from mutualrl.mwra.group import Group, Mark, end, environment, tail
from mutualrl.recipes.schema import Recipe
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tiny.cache import embedded, missing


def prepare(run: RunDirectory, recipe: Recipe, console: Console, stopping: Callable[[], None]) -> None:
    """Make the embedded models of a pool that are not in the cache, with a progress bar.

    `stopping` is called between looks and raises when the user wants to stop. Raises MutualRLError naming
    the log when a process fails.
    """
    names = missing(embedded(p.model for p in recipe.policies))
    if not names:
        return
    console.print(f"Making the embedded models {', '.join(names)} (once; they are cached)")
    groups = [_process(run, name) for name in names]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            tasks = {group: bars.add_task(f"warming up {group.name}", total=1.0) for group in groups}
            while any(group.exit_code() is None for group in groups):
                stopping()
                for group, task in tasks.items():
                    bars.update(task, completed=_share_done(group))
                    _raise_if_failed(group)
                time.sleep(0.2)
        for group in groups:
            _raise_if_failed(group)
    finally:
        end(groups)


def _process(run: RunDirectory, name: str) -> Group:
    command = [
        sys.executable, "-m", "mutualrl.tiny.make",
        f"--run-dir={run.root}", f"--policy={name}", f"--parent={os.getpid()}",
    ]  # fmt: skip
    return Group(
        name,
        command,
        run.root / "warm-up" / f"{name}.log",
        {**environment(threads=1, gpus=()), **Mark(str(run.root)).variables()},
    )


def _share_done(group: Group) -> float:
    last = tail(group.log, 1)
    try:
        return float(json.loads(last)["done"])
    except (ValueError, KeyError, TypeError):
        return 0.0


def _raise_if_failed(group: Group) -> None:
    code = group.exit_code()
    if code:
        raise MutualRLError(
            f"making the embedded model {group.name!r} failed with exit code {code}; log: {group.log}\n"
            f"{tail(group.log)}"
        )
