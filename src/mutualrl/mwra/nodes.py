"""Run over several machines: one supervisor each, which meet only in the run's directory on a shared file system."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from rich.console import Console

from mutualrl.errors import (
    MachineError,
    MutualRLError,
    PeerLostError,
    RunInterruptedError,
    UsageError,
    exit_code_of,
)
from mutualrl.mwra.placement import Allocation, Placement
from mutualrl.mwra.policy_supervisor import PolicySupervisor
from mutualrl.mwra.session import Launch
from mutualrl.process.status import StatusReader, StatusWriter, node_file
from mutualrl.recipes import Recipe
from mutualrl.recipes.batch_plan import BatchPlan
from mutualrl.storage.files import JsonObject
from mutualrl.storage.run_info import StoredAllocation
from mutualrl.storage.rundir import RunDirectory

JOIN_SECONDS = 600.0
POLL_SECONDS = 0.2


class Stoppable(Protocol):
    """Object that raises when a stop was requested."""

    def raise_if_any(self) -> None:
        """Raise RunInterruptedError once a signal has come."""


class Node:
    """This machine among the run's."""

    def __init__(self, launch: Launch, recipe: Recipe) -> None:
        self._launch = launch
        self._recipe = recipe
        self._status_reader: StatusReader | None = None
        self._last_heard: dict[int, float] = {}
        self._given_up: set[int] = set()
        self._leader_of: dict[str, int] = {}

    @property
    def _others(self) -> list[int]:
        return [node for node in range(self._launch.nodes) if node != self._launch.node]

    def status_writer(self, run: RunDirectory, session: int) -> StatusWriter:
        """Return what this node's supervisor says."""
        return StatusWriter(run.root, self._launch.node, session)

    def join(
        self, path: Path | None, console: Console, request: Stoppable
    ) -> tuple[RunDirectory, Placement, list[str]]:
        """Wait until node 0 has begun (or taken up) the run, and take the placement that it wrote."""
        if path is None:
            raise UsageError(
                "--node-rank: name the run's directory, on a file system that all nodes share, with --run-dir"
            )
        run, status_reader = RunDirectory(path), StatusReader(path)
        console.print(f"Node {self._launch.node}: waiting for node 0 in {path}", markup=False, highlight=False)
        deadline = time.monotonic() + JOIN_SECONDS
        while status_reader.read(node_file(path, 0)) is None:
            request.raise_if_any()
            if time.monotonic() > deadline:
                raise MachineError(
                    f"node 0 has not begun the run in {path} within {JOIN_SECONDS:.0f} s; is the directory on a file "
                    "system that all nodes share?"
                )
            time.sleep(POLL_SECONDS)
        info = run.info()
        if info.nodes != self._launch.nodes:
            raise UsageError(f"--nnodes {self._launch.nodes}: the run in {path} has {info.nodes} nodes")
        allocations = tuple(_allocation(entry) for entry in info.placement.values())
        return run, Placement(allocations, ()), []

    def meet(self, run: RunDirectory, console: Console, request: Stoppable, status_writer: StatusWriter) -> None:
        """Wait for the other nodes' supervisors."""
        self._status_reader = StatusReader(run.root)
        self._leader_of = {name: allocation.nodes[0] for name, allocation in run.info().placement.items()}
        missing = set(self._others)
        if missing:
            console.print(f"Waiting for node {', '.join(map(str, sorted(missing)))}", markup=False, highlight=False)
        deadline = time.monotonic() + JOIN_SECONDS
        while missing := {n for n in missing if self._status_reader.read(node_file(run.root, n)) is None}:
            status_writer.beat()
            request.raise_if_any()
            if time.monotonic() > deadline:
                raise MachineError(
                    f"node {min(missing)} has not joined within {JOIN_SECONDS:.0f} s; start there: mutualrl train "
                    f"--nnodes {self._launch.nodes} --node-rank {min(missing)} --run-dir {run.root}"
                )
            time.sleep(POLL_SECONDS)
        now = time.monotonic()
        self._last_heard = dict.fromkeys(self._others, now)

    def settled(self, run: RunDirectory, recipe: Recipe, policy_supervisor: PolicySupervisor) -> bool:
        """Return whether the run is over: each policy has left its result, or is lost, or its node has said how it
        ended."""
        assert self._status_reader is not None
        waiting = set()
        for name in self._launch.policies(recipe):
            if not run.policy(name).result.exists() and name not in policy_supervisor.lost():
                waiting.add(name)
        if not self._others or not waiting:
            return True
        lost = {name for name in waiting if self._status_reader.of(name).state == "lost"}
        gone = {name for name in waiting if self._leader_of[name] in self._given_up}
        return waiting <= lost | gone or all(
            (message := self._said(run, node)) is not None and message["outcome"] is not None for node in self._others
        )

    def check(self, run: RunDirectory, recipe: Recipe, policy_supervisor: PolicySupervisor) -> None:
        """Raise when another node failed, or fell silent; under `continue` and `wait` do without it, at once or in
        time."""
        for node in self._others:
            message = self._said(run, node)
            if message is not None:
                self._last_heard[node] = time.monotonic()
                self._heed(node, message["outcome"], policy_supervisor)
            silent = time.monotonic() - self._last_heard[node]
            timeouts = recipe.run.round_timeout if recipe.run.on_peer_loss == "wait" else recipe.run.peer_timeout
            if silent <= timeouts or node in self._given_up or policy_supervisor.stopping:
                continue
            if recipe.run.on_peer_loss != "continue":
                raise PeerLostError(f"node {node} is lost: its supervisor has been silent for {silent:.0f} s")
            self._given_up.add(node)
            policy_supervisor.mark_node_lost(node)

    def _heed(self, node: int, outcome: str | None, policy_supervisor: PolicySupervisor) -> None:
        """Do what another node's last word asks for."""
        if outcome is None or outcome == "finished":
            return
        kind, _, words = outcome.partition(": ")
        if kind == RunInterruptedError.kind:
            policy_supervisor.stopping = True
            return
        error = MutualRLError(f"node {node} ended the run: {words}")
        error.kind, error.exit_code = kind, exit_code_of(kind) or MutualRLError.exit_code
        raise error

    def _said(self, run: RunDirectory, node: int) -> JsonObject | None:
        assert self._status_reader is not None
        return self._status_reader.read(node_file(run.root, node))


def _allocation(stored: StoredAllocation) -> Allocation:
    """Return an allocation as run.json has it."""
    return Allocation(**{**dict(stored), "batch": BatchPlan(**dict(stored.batch))})
