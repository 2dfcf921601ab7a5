"""Status of the policies of a run, as its supervisor publishes it in `<run>/supervisor/node-0.json`; peers read it to
tell a policy that is being restarted from one that is gone for good."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutualrl.errors import DiskError
from mutualrl.storage.files import JsonObject, try_read_json, write_json

BEAT_SECONDS = 0.5
ELSEWHERE = "elsewhere"  # the outcome, before a colon, of a run that is looked at from another machine
STALE_SECONDS = 5.0  # a supervisor whose counter stood still for so long says nothing any more


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """Last word about a policy: `state` is running, restarting, lost or finished; `attempt` counts its starts."""

    state: str = "unknown"
    attempt: int = 0


def status_file(run: Path) -> Path:
    """Return where the supervisor of a run speaks."""
    return run / "supervisor" / "node-0.json"


class StatusWriter:
    """Supervisor's own file: call `beat` when something changed, and at least twice per second."""

    def __init__(self, run: Path, session: int) -> None:
        self._path = status_file(run)
        self._session = session
        self._counter = 0
        self._next = 0.0
        self.statuses: dict[str, PolicyStatus] = {}
        self._outcome: str | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def publish(self, policy: str, word: PolicyStatus) -> None:
        """Publish a policy's status at once."""
        self.statuses[policy] = word
        self._next = 0.0
        self.beat()

    def close(self, outcome: str) -> None:
        """Publish how the run ended: `finished`, or an error's kind and message. Nothing is published after it."""
        self._outcome = outcome
        self._next = 0.0
        self.beat()

    def beat(self) -> None:
        """Raise the counter, if it is time."""
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
            "policies": {name: asdict(word) for name, word in self.statuses.items()},
        }
        with contextlib.suppress(DiskError):  # full for a short time, say: the next one may get through
            write_json(self._path, state, durable=False)


def status_of(state: JsonObject, policy: str) -> PolicyStatus:
    """Return a policy's status in what a supervisor published; state `unknown` where it has none."""
    return PolicyStatus(**state["policies"][policy]) if policy in state["policies"] else PolicyStatus()


def _is_state(value: JsonObject) -> bool:
    """Return whether an object is what `StatusWriter` writes. The file carries no checksum: it is written twice per
    second, and is stale soon after."""
    policies = value.get("policies")
    return (
        type(value.get("session")) is int
        and type(value.get("counter")) is int
        and isinstance(value.get("outcome"), str | None)
        and isinstance(policies, dict)
        and all(_is_status(entry) for entry in policies.values())
    )


def _is_status(entry: object) -> bool:
    kinds = {"state": str, "attempt": int}
    return isinstance(entry, dict) and set(entry) == set(kinds) and all(type(entry[k]) is kinds[k] for k in kinds)


class StatusReader:
    """Reader of the supervisor's status, on its own monotonic clock. The status of a supervisor that fell silent, or
    has published nothing since this reader began, is ignored."""

    def __init__(self, run: Path) -> None:
        self._path = status_file(run)
        self._seen: tuple[Any, float, bool] | None = None

    def of(self, policy: str) -> PolicyStatus:
        """Return the newest status of a policy; state `unknown` when no live supervisor publishes it."""
        state = self.read()
        return PolicyStatus() if state is None else status_of(state, policy)

    def read(self) -> JsonObject | None:
        """Return the supervisor's status, or None when it is not (yet) known to be alive, or the file is not one
        that a supervisor writes."""
        now = time.monotonic()
        state = try_read_json(self._path)
        if state is None or not _is_state(state):
            return None
        mark = (state["session"], state["counter"])
        before, at, moved = self._seen or (mark, now, False)
        if mark != before:
            at, moved = now, True
        self._seen = (mark, at, moved)
        alive = now - at < STALE_SECONDS or state["outcome"] is not None
        return state if moved and alive else None
