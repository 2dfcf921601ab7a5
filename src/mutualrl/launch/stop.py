"""Stopping a run: signals to its supervisor, the stop request to its workers, and the final message."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from mutualrl.errors import RunInterruptedError
from mutualrl.launch.session import Launch
from mutualrl.recipes import Recipe
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import write_json
from mutualrl.storage.rundir import RunDirectory


class StopSignals:
    """SIGINT and SIGTERM received by this process: the first requests a checkpoint, the second an immediate end."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def name(self) -> str:
        """Return the first signal's name."""
        return signal.Signals(self.received[0]).name

    def raise_if_any(self) -> None:
        """Raise RunInterruptedError if a signal was received."""
        if self.received:
            raise RunInterruptedError(f"stopped by {self.name}")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Install handlers for SIGINT and SIGTERM and yield their record. (Background jobs inherit SIGINT as ignored.)"""
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
    """Write the stop request that a run's supervisor and workers poll. A second request is a no-op."""
    write_json(run.stop_file, {"at": time.time()}, durable=False)


def request_stop(run: RunDirectory, console: Console) -> None:
    """Request every worker to save a checkpoint and exit."""
    write_stop_request(run)
    console.print("Stopping: each policy finishes its step and saves a checkpoint (again to stop immediately)")


def stopped(run: RunDirectory, recipe: Recipe, launch: Launch, request: StopSignals) -> str:
    """Return the message of a stopped run: its checkpoints and the command to resume."""
    steps = {name: max(Checkpoints(run.policy(name).root).steps(), default=None) for name in launch.policies(recipe)}
    checkpoints = ", ".join(
        f"{name} at {'the start' if step is None else f'step {step}'}" for name, step in steps.items()
    )
    cause = f"by {request.name}" if request.received else "at the request of another process"
    command = f"mutualrl train --resume --run-dir {run.root}"
    if launch.policy is not None and recipe.bucket is not None:
        command = f"mutualrl join {recipe.bucket.url} --policy {launch.policy} --run-dir {run.root}"
    return f"stopped {cause}; checkpoints: {checkpoints}; resume with: {command}"
