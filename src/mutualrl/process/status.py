"""Status of a run's policies, which its supervisor publishes in `<run>/supervisor/node-0.json`; peers read it to tell
a policy that is restarting from one that is lost."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mutualrl.errors import DiskError
from mutualrl.storage.files import JsonObject, try_read_json, write_json

BEAT_SECONDS = 0.5
ELSEWHERE = "elsewhere"  # prefix, before a colon, of the outcome of a run that is viewed from another machine
STALE_SECONDS = 5.0  # a status is ignored when its counter has not advanced for this long


class PolicyState(StrEnum):
    """State of a policy in its run, as its supervisor knows it; UNKNOWN to a reader without a live supervisor."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    LOST = "lost"
    FINISHED = "finished"


class RunState(StrEnum):
    """State of a run, as read from its directory. ENDED: without a final status, such as after `kill -9`; ELSEWHERE:
    viewed from another machine."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """Last published status of a policy; `attempt` counts the starts."""

    state: PolicyState = PolicyState.UNKNOWN
    attempt: int = 0


def status_file(run: Path) -> Path:
    """Return the status file of a run's supervisor."""
    return run / "supervisor" / "node-0.json"


class StatusWriter:
    """Writer of the supervisor's status file: call `beat` after a change, and at least twice per second."""

    def __init__(self, run: Path, session: int) -> None:
        self._path = status_file(run)
        self._session = session
        self._counter = 0
        self._next = 0.0
        self.statuses: dict[str, PolicyStatus] = {}
        self._outcome: str | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def publish(self, policy: str, word: PolicyStatus) -> None:
        """Publish a policy's status immediately."""
        self.statuses[policy] = word
        self._next = 0.0
        self.beat()

    def close(self, outcome: str) -> None:
        """Publish the outcome of the run: `finished`, or an error's kind and message. No status may follow it."""
        self._outcome = outcome
        self._next = 0.0
        self.beat()

    def beat(self) -> None:
        """Write the status with the next counter, if it is due."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BEAT_SECONDS
        self._counter += 1
        state: JsonObject = {
            "counter": self._counter,
            "session": self._session,
            "pid": os.getpid(),
            "host": platform.node(),
            "outcome": self._outcome,
            "policies": {name: asdict(status) for name, status in self.statuses.items()},
        }
        with contextlib.suppress(DiskError):  # e.g. briefly full: the next write may succeed
            write_json(self._path, state, durable=False)


def status_of(state: JsonObject, policy: str) -> PolicyStatus:
    """Return a policy's status in a supervisor's published state; `unknown` if it has none."""
    entry = state["policies"].get(policy)
    return PolicyStatus() if entry is None else PolicyStatus(PolicyState(entry["state"]), entry["attempt"])


def _is_state(value: JsonObject) -> bool:
    """Return whether an object has the form that `StatusWriter` writes. The file has no checksum: it is written twice
    per second and is soon stale."""
    policies = value.get("policies")
    return (
        type(value.get("session")) is int
        and type(value.get("counter")) is int
        and isinstance(value.get("outcome"), str | None)
        and isinstance(policies, dict)
        and all(_is_status(entry) for entry in policies.values())
    )


def _is_status(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"state", "attempt"}
        and entry["state"] in list(PolicyState)
        and type(entry["attempt"]) is int
    )


class StatusReader:
    """Reader of the supervisor's status, on its own monotonic clock. The status is ignored if it is stale, or has not
    changed since this reader was created."""

    def __init__(self, run: Path) -> None:
        self._path = status_file(run)
        self._seen: tuple[Any, float, bool] | None = None

    def of(self, policy: str) -> PolicyStatus:
        """Return the newest status of a policy; `unknown` when no live supervisor publishes it."""
        state = self.read()
        return PolicyStatus() if state is None else status_of(state, policy)

    def read(self) -> JsonObject | None:
        """Return the supervisor's status; None if the supervisor is not (yet) known to be alive, or the file is
        malformed."""
        now = time.monotonic()
        state = try_read_json(self._path)
        if state is None or not _is_state(state):
            return None
        version = (state["session"], state["counter"])
        previous, changed_at, changed = self._seen or (version, now, False)
        if version != previous:
            changed_at, changed = now, True
        self._seen = (version, changed_at, changed)
        alive = now - changed_at < STALE_SECONDS or state["outcome"] is not None
        return state if changed and alive else None
