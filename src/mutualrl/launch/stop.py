"""Stopping a run: signals to its supervisor, the stop request to its workers, and the final message."""

from __future__ import annotations

import time

from rich.console import Console

from mutualrl.launch.session import Launch
from mutualrl.process.stop_signals import StopSignals
from mutualrl.recipes import Recipe
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.files import write_json
from mutualrl.storage.rundir import RunDirectory


def write_stop_request(run: RunDirectory) -> None:
    """Write the stop request that a run's supervisor and workers poll. A second request is a no-op."""
    write_json(run.stop_file, {"at": time.time()}, durable=False)


def request_stop(run: RunDirectory, console: Console, *, policies: bool = True) -> None:
    """Request every worker to save a checkpoint and exit. `policies`: there are any, not a source alone."""
    write_stop_request(run)
    what = "each policy finishes its step and saves a checkpoint" if policies else "what the source has published stays"
    console.print(f"Stopping: {what} (again to stop immediately)")


def stopped(run: RunDirectory, recipe: Recipe, launch: Launch, request: StopSignals) -> str:
    """Return the message of a stopped run: its checkpoints and the command to resume."""
    steps = {name: max(Checkpoints(run.policy(name).root).steps(), default=None) for name in launch.policies(recipe)}
    checkpoints = ", ".join(
        f"{name} at {'the start' if step is None else f'step {step}'}" for name, step in steps.items()
    )
    saved = f"checkpoints: {checkpoints}" if steps else "what it has published stays"
    cause = f"by {request.name}" if request.received else "at the request of another process"
    command = f"mutualrl train --resume --run-dir {run.root}"
    if launch.member is not None and recipe.bucket is not None:
        command = f"mutualrl join {recipe.bucket.url} --policy {launch.member} --run-dir {run.root}"
    return f"stopped {cause}; {saved}; resume with: {command}"
