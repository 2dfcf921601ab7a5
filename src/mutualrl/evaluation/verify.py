"""Lenient score: `math-verify` in worker processes that are killed at a deadline.

It parses and evaluates model output. A completion such as `\\boxed{9^{9^{9}}}` would never return, and holds the GIL:
hence worker processes, a deadline per answer, and a third verdict, `unverified`, for undecided answers. The deadline is
2 s of the worker's CPU time, so that the machine's load does not change verdicts; a worker that does not compute is
killed after 60 s. The score is reported next to the exact one; the exchange never uses it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO, Any

import psutil
from rich.console import Console
from rich.progress import Progress

from mutualrl.errors import MachineError
from mutualrl.tasks.boxed import last_boxed

DEADLINE = 2.0  # CPU seconds per answer
LATEST = 60.0  # wall-clock seconds per answer
STARTING = 60.0  # seconds for a worker to import the library
WORKERS = 2
LONGEST = 100_000  # characters; of a longer completion only the last box is scored, or the end


def check_installed() -> None:
    """Raise MachineError when math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise MachineError("--also math-verify: it is not installed; pip install 'mutualrl[verify]'")


def _short(completion: str) -> str:
    if len(completion) <= LONGEST:
        return completion
    content = last_boxed(completion)
    return completion[-LONGEST:] if content is None else f"\\boxed{{{content[:LONGEST]}}}"


class _Worker:
    """Worker process and the index of its current answer. `deadline`: time of the next check."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mutualrl.evaluation.verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.place: int | None = None
        self.deadline = time.monotonic() + STARTING
        self.pending = b""
        self.ready = False
        self._latest = self.deadline
        self._began = 0.0

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def submit(self, place: int, completion: str, answer: str) -> None:
        assert self.process.stdin is not None
        self.place, self.deadline = place, time.monotonic() + DEADLINE
        self._latest, self._began = time.monotonic() + LATEST, self._cpu_seconds()
        line = json.dumps({"completion": _short(completion), "answer": answer}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it died; the next poll detects it
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()

    def has_time_left(self) -> bool:
        """Return whether it may continue; set the deadline to the earliest time at which its CPU time can run out."""
        now = time.monotonic()
        if self.place is None or now >= self._latest:
            return self.deadline > now
        self.deadline = min(now + DEADLINE - (self._cpu_seconds() - self._began), self._latest)
        return self.deadline > now

    def _cpu_seconds(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def verdicts(pairs: Sequence[tuple[str, str]], console: Console | None = None) -> list[bool | None]:
    """Return whether each completion matches its answer; None if undecided, by the deadline or by the library.

    Raises MachineError when the library cannot be started.
    """
    check_installed()
    results: list[bool | None] = [None] * len(pairs)
    waiting = deque(range(len(pairs)))
    remaining = len(pairs)
    workers: list[_Worker] = []
    with (
        selectors.DefaultSelector() as ready,
        Progress(console=console, transient=True, disable=console is None or not console.is_terminal) as bars,
    ):
        bar = bars.add_task("math-verify", total=len(pairs))

        def start() -> None:
            workers.append(worker := _Worker())
            ready.register(worker.stdout, selectors.EVENT_READ, worker)

        def drop(worker: _Worker) -> None:
            ready.unregister(worker.stdout)
            workers.remove(worker)
            worker.end()

        try:
            for _ in range(min(WORKERS, len(pairs))):
                start()
            while remaining:
                nearest = min(worker.deadline for worker in workers)
                for key, _ in ready.select(max(0.0, nearest - time.monotonic())):
                    worker = key.data
                    remaining -= _receive(worker, results, bars, bar)
                    if worker.process.poll() is not None or worker.place is not None or not worker.ready:
                        continue
                    if waiting:
                        place = waiting.popleft()
                        worker.submit(place, *pairs[place])
                    else:
                        worker.deadline = float("inf")
                for worker in list(workers):
                    if worker.process.poll() is None and worker.has_time_left():
                        continue
                    if not worker.ready:
                        raise MachineError("math-verify cannot be started; does `import math_verify` work here?")
                    remaining -= worker.place is not None
                    drop(worker)
                    if remaining:
                        start()
        finally:
            for worker in list(workers):
                drop(worker)
    return results


def _receive(worker: _Worker, result: list[bool | None], bars: Progress, bar: Any) -> int:
    """Read a worker's output; return the number of answers that it decides (0 or 1)."""
    *lines, worker.pending = (worker.pending + os.read(worker.stdout.fileno(), 65536)).split(b"\n")
    decided = 0
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:  # printed by a library
            continue
        if "verdict" not in message:
            worker.ready = True
        elif worker.place is not None:
            result[worker.place] = message["verdict"]
            worker.place = None
            bars.advance(bar)
            decided += 1
    return decided


def verified(pairs: Sequence[tuple[str, str]], console: Console | None = None) -> dict[str, object]:
    """Return `{"n", "correct", "accuracy", "unverified"}`: undecided answers count as wrong in the accuracy."""
    decided = verdicts(pairs, console)
    correct = sum(verdict is True for verdict in decided)
    return {
        "n": len(decided),
        "correct": correct,
        "accuracy": correct / len(decided),
        "unverified": sum(verdict is None for verdict in decided),
    }
