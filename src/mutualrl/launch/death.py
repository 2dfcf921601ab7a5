"""How an attempt of a policy ended: its own error, the crash of a reward function, or a death."""

from __future__ import annotations

import signal
from pathlib import Path

from mutualrl.console.display import clean
from mutualrl.errors import (
    DIED,
    MutualRLError,
    PeerLostError,
    RecordedError,
    RewardError,
    RunInterruptedError,
    WaitTimeoutError,
    exit_code_of,
)
from mutualrl.see.liveness import Phase, last_heartbeat
from mutualrl.see.location import record_store
from mutualrl.storage.files import try_read_json
from mutualrl.storage.rundir import RunDirectory

#: error kinds of a worker that ends because a peer ended: consequences, not causes
CONSEQUENCES = (PeerLostError.kind, WaitTimeoutError.kind, RunInterruptedError.kind)
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def failure_of(run: RunDirectory, policy: str) -> tuple[str, str] | None:
    """Return the kind and message of a policy's failure file, or None if there is none."""
    value = try_read_json(run.policy(policy).failure)
    return None if value is None else (str(value.get("kind")), str(value.get("message")))


def own_error(run: RunDirectory, policy: str, code: int | None, where: str) -> MutualRLError | None:
    """Return the error that ends the run, because a restart would end in the same way: one that the policy recorded, or
    the crash of a reward function's library. None for a death and for the consequence of another policy's end. `where`:
    the end of the message, about the log."""
    failure = failure_of(run, policy)
    if failure is None:
        crash = None if code is None else reward_failure(run, policy, code)
        return None if crash is None else RewardError(f"policy {policy!r}: {crash}{where}")
    if failure[0] in (DIED, *CONSEQUENCES):
        return None
    return recorded_error(member(run, policy), failure, code, where)


def member(run: RunDirectory, name: str) -> str:
    """Return a member's name for messages: of a policy, or of a source that is asked."""
    return f"{'source' if run.asked_source(name).is_dir() else 'policy'} {name!r}"


def recorded_error(who: str, failure: tuple[str, str], code: int | None, where: str) -> MutualRLError:
    """Return a recorded failure of `who` as an error with its kind and exit code; an unknown kind counts as a lost
    peer."""
    kind, message = failure
    ended = "" if code is None else f" (exit code {code})"
    exit_code = exit_code_of(kind)
    if exit_code is None:
        kind, exit_code = PeerLostError.kind, PeerLostError.exit_code
    return RecordedError(kind, exit_code, f"{who} failed{ended}: {message}{where}")


def describe_death(run: RunDirectory, policy: str, code: int) -> str:
    """Return how a policy's process ended, for a message: its exit code, its own error, if any, and otherwise what it
    was last seen at, such as a reward function whose library crashed."""
    failure = failure_of(run, policy)
    beat = last_heartbeat(record_store(run), policy) or {}
    seen = f", last seen: {clean(str(beat['phase']), 200)}" if beat.get("phase") else ""
    cause = f", no error recorded{seen}" if failure is None else f": {failure[1]}"
    return f"died (exit code {code}{cause})"


def reward_failure(run: RunDirectory, policy: str, code: int) -> str | None:
    """Return the message for a policy whose process crashed while a reward function ran, because its library aborts or
    reads invalid memory: a restart would end in the same way. None for any other end."""
    beat = last_heartbeat(record_store(run), policy) or {}
    phase, scoring = str(beat.get("phase", "")), f"{Phase.SCORING}: "
    codes = {number for crash in _CRASHES for number in (128 + crash, -crash)}
    if not phase.startswith(scoring) or code not in codes:
        return None
    return f"{clean(phase.removeprefix(scoring), 200)} ended its process (exit code {code})"


def tail(log: Path, lines: int = 5) -> str:
    """Return the last lines of a log."""
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
