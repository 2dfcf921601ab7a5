"""Stopping a run: signals to its supervisor, the request to its workers, and what it leaves."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from mutualrl.errors import RunInterruptedError
from mutualrl.mwra.session import Launch
from mutualrl.recipes import Recipe
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import write_json
from mutualrl.storage.rundir import RunDirectory


class StopSignals:
    """SIGINT and SIGTERM of this process, counted: the first asks for a checkpoint, the second for an end at once."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def name(self) -> str:
        """Return the first signal's name."""
        return signal.Signals(self.received[0]).name

    def raise_if_any(self) -> None:
        """Raise RunInterruptedError once a signal has come."""
        if self.received:
            raise RunInterruptedError(f"stopped by {self.name}")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Yield explicit handlers for SIGINT and SIGTERM. (A job started in the background inherits SIGINT as ignored.)"""
    signals = StopSignals()

    def handler(number: int, frame: FrameType | None) -> None:
        signals.received.append(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def write_stop_request(run: RunDirectory) -> None:
    """Write what the supervisor and every worker of a run look for. A second request changes nothing."""
    write_json(run.stop_file, {"at": time.time()}, durable=False)


def ask_to_stop(run: RunDirectory, console: Console) -> None:
    """Ask every worker to save a checkpoint and end."""
    write_stop_request(run)
    console.print("Stopping: each policy finishes its step and saves a checkpoint (again to stop at once)")


def stopped(run: RunDirectory, recipe: Recipe, launch: Launch, request: StopSignals) -> str:
    """Return the message about what a stopped run leaves."""
    steps = {name: max(Checkpoints(run.policy(name).root).steps(), default=None) for name in launch.policies(recipe)}
    checkpoints = ", ".join(
        f"{name} at {'the start' if step is None else f'step {step}'}" for name, step in steps.items()
    )
    why = f"by {request.name}" if request.received else "on request of another process"
    again = f"mutualrl train --resume --run-dir {run.root}"
    if launch.policy is not None and recipe.bucket is not None:
        again = f"mutualrl join {recipe.bucket.url} --policy {launch.policy} --run-dir {run.root}"
    return f"stopped {why}; checkpoints: {checkpoints}; resume with: {again}"
