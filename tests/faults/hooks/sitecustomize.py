"""Stop a process of a run at a named point, where a test can kill it from outside.

Python imports this module at start if its directory is on PYTHONPATH. `FAULT_POINTS=point:policy:n,...` stops the
policy's process the n-th time (from 0) it reaches the first point; the next process stops at the second, and so on.
Each stop creates a file with the process id: `FAULT_MARK.0`, `FAULT_MARK.1`, ..., one per point reached so far.

`FAULT_DISK=policy:part of a path:n:ERRNO` makes every fsync of matching files fail from the n-th (from 0) on, as on a
full or failing disk. `FAULT_SAVE=seconds` delays the main rank's save of the final model. `FAULT_CLOCK=1` makes the
wall clock jump by up to a day, either way, at every reading.
"""

from __future__ import annotations

import errno
import importlib.abc
import importlib.util
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

_MARK = os.environ.get("FAULT_MARK", "")
_INDEX = next(n for n in range(1000) if not Path(f"{_MARK}.{n}").exists())
_STOPS = [point.split(":") for point in os.environ.get("FAULT_POINTS", "").split(",") if point]
_POINT, _POLICY, _NTH = _STOPS[_INDEX] if len(_STOPS) > _INDEX else ["", "", ""]
_PASSES: Counter[str] = Counter()


def at(point: str) -> None:
    """Stop the process if this is the requested pass of the requested point; write its process id to the mark."""
    if point != _POINT or f"--policy={_POLICY}" not in sys.argv:
        return
    _PASSES[point] += 1
    if _PASSES[point] <= int(_NTH):
        return
    try:
        descriptor = os.open(f"{_MARK}.{_INDEX}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(descriptor, str(os.getpid()).encode())
    os.close(descriptor)
    while True:
        time.sleep(1)


def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Add points before and after a function."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            at(before)
        result = original(*args, **kwargs)
        if after:
            at(after)
        return result

    setattr(owner, name, wrapped)


def exchange(module: ModuleType) -> None:
    around(module.Exchange, "write_part", before="before-shard")
    around(module.Exchange, "commit", before="between-shard-and-marker", after="after-marker")
    around(module.Exchange, "wait", before="in-the-wait")


def store(module: ModuleType) -> None:
    write = module.write_atomic

    def write_atomic(path: Any, data: bytes, **kwargs: Any) -> None:
        if path.suffix == ".parquet" and _POINT == "mid-shard":
            path.with_name(f".{path.name}.half.tmp").write_bytes(data[: len(data) // 2])
            at("mid-shard")
        write(path, data, **kwargs)

    module.write_atomic = write_atomic


def checkpoints(module: ModuleType) -> None:
    around(module.Checkpoints, "commit", before="checkpoint-summed")
    around(module.Checkpoints, "prune", before="checkpoint-before-prune", after="checkpoint-pruned")
    around(module, "write_checksummed", after="checkpoint-marked")
    around(module, "write_json", before="checkpoint-renamed", after="checkpoint-latest")
    sync = module.sync_directory

    def sync_directory(path: Any) -> None:
        sync(path)
        if path.name.startswith("step-"):
            at("checkpoint-half-pruned")

    module.sync_directory = sync_directory


def checkpointing(module: ModuleType) -> None:
    around(module.Checkpointer, "save", before="checkpoint-begin", after="checkpoint-done")


def trl(module: ModuleType) -> None:
    around(module.GRPOTrainer, "_generate", before="in-generation", after="after-generation")


def trainer(module: ModuleType) -> None:
    around(module.MutualGRPOTrainer, "compute_loss", before="in-the-loss")
    around(module.MutualGRPOTrainer, "calling", before="in-a-tool-call")
    around(module, "write_state", before="checkpoint-files", after="checkpoint-written")


def guides(module: ModuleType) -> None:
    around(module, "act_again", after="in-a-replay")


def validation(module: ModuleType) -> None:
    around(module.Validator, "__call__", before="in-validation")


def adapters(module: ModuleType) -> None:
    save, seconds = module.save_model, float(os.environ.get("FAULT_SAVE", "0"))

    def save_model(*args: Any) -> None:
        save(*args)
        if os.environ.get("RANK", "0") == "0":
            time.sleep(seconds)

    module.save_model = save_model
    around(module, "commit_directory", before="model-staged", after="model-committed")


def resume(module: ModuleType) -> None:
    around(module.PolicyProgress, "result", before="before-the-result")


POINTS = {
    "mutualrl.training.adapters": adapters,
    "mutualrl.training.resume": resume,
    "mutualrl.training.guides": guides,
    "mutualrl.training.validation": validation,
    "mutualrl.see.exchange": exchange,
    "mutualrl.see.store": store,
    "mutualrl.adapter.trl_compat": trl,
    "mutualrl.storage.checkpoints": checkpoints,
    "mutualrl.training.checkpointing": checkpointing,
    "mutualrl.training.trainer": trainer,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finder that adds the points to modules as they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in POINTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            POINTS[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def failing_disk(policy: str, part: str, nth: int, code: int) -> None:
    """Make fsync fail as the operating system would."""
    fsync, count = os.fsync, 0

    def failing(descriptor: int) -> None:
        nonlocal count
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if part in path and f"--policy={policy}" in sys.argv:
            count += 1
            if count > nth:
                raise OSError(code, os.strerror(code), path)
        fsync(descriptor)

    os.fsync = failing


def jumping_clock() -> None:
    """Add a random offset of up to a day to time.time()."""
    now, rng = time.time, random.Random(os.getpid())
    time.time = lambda: now() + rng.uniform(-86_400, 86_400)


if os.environ.get("FAULT_DISK"):
    _policy, _part, _nth, _code = os.environ["FAULT_DISK"].split(":")
    failing_disk(_policy, _part, int(_nth), getattr(errno, _code))
if os.environ.get("FAULT_CLOCK"):
    jumping_clock()
if _POINT or os.environ.get("FAULT_SAVE"):
    sys.meta_path.insert(0, Finder())
