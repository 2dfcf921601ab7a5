"""One policy's process group: start, watch, end. `end` also ends every process that the group started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from mutualrl.process import loopback
from mutualrl.see.exchange import claimed_attempt
from mutualrl.see.liveness import clear_heartbeats
from mutualrl.see.location import record_store
from mutualrl.storage.allocation import Devices
from mutualrl.storage.files import remove_temporaries
from mutualrl.storage.rundir import RunDirectory

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL


class ProcessGroup:
    """Running child of the supervisor (an agent or a preparing process) and its log file."""

    def __init__(self, name: str, command: list[str], log: Path, variables: dict[str, str]) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._output: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which ends the group
        )
        self._root = psutil.Process(self._process.pid)

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def processes(self) -> list[psutil.Process]:
        """Return the child and its living descendants."""
        try:
            return [self._root, *self._root.children(recursive=True)] if self.exit_code() is None else []
        except psutil.NoSuchProcess:
            return []

    def close(self) -> None:
        """Close the log file."""
        self._process.poll()
        self._output.close()


def agent(run: RunDirectory, allocation: Devices, attempt: int) -> ProcessGroup:
    """Start the agent of a policy's process group on its devices. Raises MachineError if the run has no directory."""
    run.require_present()
    command = [
        sys.executable,
        "-m",
        "mutualrl.launch.agent",
        f"--run-dir={run.root}",
        f"--policy={allocation.policy}",
        f"--attempt={attempt}",
        f"--processes={allocation.processes}",
        f"--parent={os.getpid()}",
    ]
    log = run.policy(allocation.policy).logs / f"attempt-{attempt}.log"
    tag = ProcessTag(str(run.root), allocation.policy)
    return ProcessGroup(
        allocation.policy,
        command,
        log,
        {**loopback.variables(os.environ), **environment(allocation.threads, allocation.gpus), **tag.variables()},
    )


def next_attempt(run: RunDirectory, policy: str) -> int:
    """Return the number of a policy's next attempt, over all sessions: one after the newest with a log or a claim."""
    names = (re.match(r"attempt-([0-9]+)\.", p.name) for p in run.policy(policy).logs.glob("attempt-*"))
    logs = max((int(match[1]) for match in names if match), default=-1)
    claim = claimed_attempt(record_store(run), policy)
    return max(logs, -1 if claim is None else claim) + 1


def clear_attempt(run: RunDirectory, policy: str) -> None:
    """Remove the temporary files, the error and the heartbeats of a policy's earlier attempts."""
    for directory in (run.exchange / policy, run.policy(policy).root):
        remove_temporaries(directory)
    run.policy(policy).failure.unlink(missing_ok=True)
    clear_heartbeats(run.exchange, policy)


def environment(threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process of the run, with its threads and only its GPUs."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",  # else `python -m` would import a torch.py from the user's directory
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }


@dataclass(frozen=True, slots=True)
class ProcessTag:
    """Environment variables that identify a run's processes after their parent has ended: its directory and, if it
    matters, the policy. Every process of a run inherits them."""

    run: str
    policy: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the tag as environment variables."""
        return {"MUTUALRL_RUN": self.run} | ({} if self.policy is None else {"MUTUALRL_POLICY": self.policy})

    def processes(self) -> set[psutil.Process]:
        """Return all living processes with this tag, except this process and its ancestors."""
        excluded = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
        tag = self.variables().items()
        return {
            process
            for process in psutil.process_iter(["environ"])  # None for another user's process
            if process.pid not in excluded and tag <= (process.info["environ"] or {}).items()
        }


def end(groups: Iterable[ProcessGroup], tag: ProcessTag | None = None, grace: float = GRACE_SECONDS) -> None:
    """End groups with their descendants, and all processes with a tag: SIGTERM, then SIGKILL after `grace` seconds."""
    groups = list(groups)

    def living() -> set[psutil.Process]:
        return {p for group in groups for p in group.processes()} | (tag.processes() if tag else set())

    pending = living()
    for process in pending:
        _signal(process, kill=False)
    deadline = time.monotonic() + grace
    while any(_alive(p) for p in pending) and time.monotonic() < deadline:
        for group in groups:
            group.exit_code()  # reaps
        time.sleep(0.05)
    for process in pending | living():
        _signal(process, kill=True)
    for group in groups:
        group.close()


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        if _alive(process):
            process.kill() if kill else process.terminate()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return  # ended, or another user's
