"""The supervisor of a run: claims the directory, starts a group per policy, watches, and collects the results."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from mutualrl.display import clean
from mutualrl.errors import MutualRLError, PeerLostError, RunDirectoryError, RunInterruptedError, exit_code_of
from mutualrl.files import read_json, write_atomic, write_json
from mutualrl.mwra.devices import this_machine
from mutualrl.mwra.group import Group, agent, end, failure_of, tail
from mutualrl.mwra.placement import Placement, place
from mutualrl.mwra.prepare import prepare
from mutualrl.mwra.progress import Progress
from mutualrl.mwra.requirements import require
from mutualrl.recipes import Recipe, dump
from mutualrl.rundir import RunDirectory, check_free, command_line, create, default_path, versions
from mutualrl.see.liveness import PeerWatch
from mutualrl.tiny.cache import embedded, require_writable
from mutualrl.training.plan import fingerprint, load_prompts, require_enough

POLL_SECONDS = 0.2
#: a policy that ends because a peer ended is not the cause; the others get so long to be found.
CAUSE_SECONDS = 1.0
#: a frozen policy is found by the peer that waits for it, and only so much later by the supervisor.
FROZEN_SECONDS = 10.0


def train(recipe: Recipe, console: Console) -> tuple[RunDirectory, dict[str, Any]]:
    """Carry out a run from its recipe; returns its directory and the summary.

    Everything that can be checked without a model is checked before the directory is made. Raises
    RunInterruptedError, PeerLostError, or the error of the policy that failed; no process is left then.
    """
    began = time.monotonic()
    if recipe.run.dir is not None:
        check_free(Path(recipe.run.dir))
    machine = this_machine()
    require(recipe, machine)
    placement = place(recipe, machine)
    prompts = load_prompts(recipe, "train")
    load_prompts(recipe, "validation")
    batch = placement.seats[0].batch
    require_enough(prompts, batch)
    require_writable(embedded(p.model for p in recipe.policies))
    text = f"# {json.dumps(command_line())}\n{dump(without_directory(recipe))}"
    with stop_signals() as stopping:
        run = claim(recipe, run_info(recipe, placement, fingerprint(recipe, batch, prompts)))
        write_atomic(run.recipe, text.encode())
        console.print(f"Run directory: {clean(str(run.root))}", markup=False, highlight=False, soft_wrap=True)
        for note in placement.notes:
            console.print(f"Note: {note}", markup=False)
        prepare(run, recipe, console, stopping)
        run_groups(run, recipe, placement, console, stopping)
    summary = collect(run, recipe, time.monotonic() - began)
    write_json(run.summary, summary)
    return run, summary


def claim(recipe: Recipe, info: dict[str, Any]) -> RunDirectory:
    """The run's directory: the one asked for, or a new one under runs/ that no other run has taken."""
    if recipe.run.dir is not None:
        return create(Path(recipe.run.dir), info)
    while True:
        path = default_path(recipe.regime_name, recipe.pool or "pool")
        try:
            return create(path, info)
        except RunDirectoryError:
            if not path.exists():  # not taken by another run: it cannot be written
                raise


def without_directory(recipe: Recipe) -> Recipe:
    """The recipe as it is kept in the run: whoever runs it again gets a directory of their own."""
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": None})})


def run_info(recipe: Recipe, placement: Placement, plan: dict[str, Any]) -> dict[str, Any]:
    """The content of run.json."""
    return {
        "run_id": uuid.uuid4().hex,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command_line(),
        "versions": versions(),
        "seed": recipe.run.seed,
        "regime": recipe.regime_name,
        "pool": recipe.pool,
        "fingerprint": plan,
        "placement": {seat.policy: asdict(seat) for seat in placement.seats},
    }


@contextmanager
def stop_signals() -> Iterator[Callable[[], None]]:
    """Explicit handlers for SIGINT and SIGTERM; yields a function that raises once one has come.

    (A job started in the background inherits SIGINT as ignored; the explicit handler undoes that.)
    """
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    def stopping() -> None:
        if received:
            raise RunInterruptedError(f"stopped by {signal.Signals(received[0]).name}")

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def run_groups(
    run: RunDirectory, recipe: Recipe, placement: Placement, console: Console, stopping: Callable[[], None]
) -> None:
    """Start a group per policy and wait for all; end every process when one fails or the user stops."""
    groups: list[Group] = []
    try:
        with Progress(run, [p.name for p in recipe.policies], recipe.run.steps, console) as progress:
            groups.extend(agent(run, seat) for seat in placement.seats)
            watch = PeerWatch(run.exchange)
            while any(group.exit_code() is None for group in groups):
                stopping()
                if any(group.exit_code() for group in groups):
                    break
                progress.update()
                _check_alive(groups, watch, recipe.run.peer_timeout)
                time.sleep(POLL_SECONDS)
            progress.update()
        if any(group.exit_code() for group in groups):
            raise _cause(run, groups)
    finally:
        end(groups, marks=[str(run.root)])


def _check_alive(groups: list[Group], watch: PeerWatch, peer_timeout: float) -> None:
    """Raise PeerLostError for a policy that runs but is frozen. Its peers are given the time to find out first."""
    for group in groups:
        silent, phase = watch.silence(group.name)
        if group.exit_code() is None and phase != "not started" and silent > peer_timeout + FROZEN_SECONDS:
            raise PeerLostError(
                f"policy {group.name!r} is frozen: no heartbeat for {silent:.0f} s (last seen: {phase}); "
                f"log: {group.log}"
            )


def _cause(run: RunDirectory, groups: list[Group]) -> MutualRLError:
    """The error of the policy that failed first: one that died without a word, before one that lost a peer."""
    time.sleep(CAUSE_SECONDS)
    failed = [(group, failure_of(run, group.name)) for group in groups if group.exit_code()]
    failed.sort(key=lambda pair: pair[1] is not None and pair[1][0] in ("peer-lost", "wait-timeout", "interrupted"))
    group, failure = failed[0]
    where = f"log: {group.log}"
    if failure is None:
        return PeerLostError(
            f"policy {group.name!r} died (exit code {group.exit_code()}, no error of its own); {where}\n"
            f"{tail(group.log)}"
        )
    kind, message = failure
    error = MutualRLError(f"policy {group.name!r} failed (exit code {group.exit_code()}): {message}\n{where}")
    code = exit_code_of(kind)
    # An exception that is not one of ours is a death like any other: the pool has lost a policy.
    error.kind, error.exit_code = (kind, code) if code is not None else (PeerLostError.kind, PeerLostError.exit_code)
    return error


def collect(run: RunDirectory, recipe: Recipe, seconds: float) -> dict[str, Any]:
    """The summary of a finished run, from the policies' results."""
    policies = {}
    for policy in recipe.policies:
        result = read_json(run.policy(policy.name).result)
        if result is None:
            raise MutualRLError(f"policy {policy.name!r} ended without a result; logs: {run.policy(policy.name).logs}")
        policies[policy.name] = result
    return {
        "regime": recipe.regime_name,
        "pool": recipe.pool,
        "task": recipe.task.name,
        "seed": recipe.run.seed,
        "steps": recipe.run.steps,
        "seconds": round(seconds, 3),
        "policies": policies,
    }
