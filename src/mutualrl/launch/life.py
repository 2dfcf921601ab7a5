"""Life of a policy in a run: a pure state machine `(life, event) -> (life, actions)`.

The local supervisor and the Ray launcher observe processes, files and tasks, turn what they see into events, and carry
out the actions. Nothing here reads a clock: a time is in seconds on the caller's monotonic clock.

    STARTING --Begin--> RUNNING --Finish--> FINISHED
                        RUNNING --Die--> RESTARTING --Tick, once due--> RUNNING
                        RUNNING --Die, no restart left--> LOST
                        RUNNING --Stop, Die--> STOPPED
                        RESTARTING --Stop--> STOPPED

STOPPED, LOST and FINISHED are final. An event that means nothing in a state changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from mutualrl.process.status import PolicyState
from mutualrl.recipes.schema import RunSection

BACK_OFF_SECONDS = 1.0  # before the first restart; doubled before each further one
LONGEST_BACK_OFF_SECONDS = 60.0
#: states of a policy that runs or will run
ACTIVE = frozenset({PolicyState.STARTING, PolicyState.RUNNING, PolicyState.RESTARTING})


@dataclass(frozen=True, slots=True)
class Begin:
    """Start of the session."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The policy's result is written, whether or not its processes have ended cleanly."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop of the run was requested: running policies save a checkpoint and end on their own."""


@dataclass(frozen=True, slots=True)
class Die:
    """End of a policy without result or own error, at a time, with a reason. `fresh`: it had got past its start."""

    at: float
    reason: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Passing of time."""

    at: float


Event = Begin | Finish | Stop | Die | Tick


class Action(StrEnum):
    """What the launcher does after a transition: start an attempt; end what is left of the last one; say that and when
    it restarts; give the policy up."""

    START = "start"
    END = "end"
    RESTART = "restart"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Life:
    """State of a policy. `restarts`: so far; `due`: time of its next restart; `died`: time of its first death since it
    last got past its start; `reason`: of its last death; `stopping`: a stop was requested."""

    state: PolicyState = PolicyState.STARTING
    restarts: int = 0
    due: float | None = None
    died: float | None = None
    reason: str = ""
    stopping: bool = False

    @property
    def active(self) -> bool:
        """Return whether the policy runs or will run."""
        return self.state in ACTIVE


def advance(life: Life, event: Event, section: RunSection) -> tuple[Life, tuple[Action, ...]]:
    """Return a policy's life after an event, and the actions to carry out, in order."""
    match life.state, event:
        case PolicyState.STARTING, Begin():
            return replace(life, state=PolicyState.RUNNING), (Action.START,)
        case PolicyState.STARTING, Finish():  # in an earlier session
            return replace(life, state=PolicyState.FINISHED), ()
        case PolicyState.RUNNING, Finish():
            return replace(life, state=PolicyState.FINISHED), (Action.END,)
        case PolicyState.RUNNING, Stop():
            return replace(life, stopping=True), ()
        case PolicyState.RUNNING, Die() if life.stopping:
            return replace(life, state=PolicyState.STOPPED), (Action.END,)
        case PolicyState.RUNNING, Die():
            return _after_death(life, event, section)
        case PolicyState.STARTING | PolicyState.RESTARTING, Stop():
            return replace(life, state=PolicyState.STOPPED, due=None, stopping=True), ()
        case PolicyState.RESTARTING, Tick() if life.due is not None and event.at >= life.due:
            return replace(life, state=PolicyState.RUNNING, due=None), (Action.START,)
    return life, ()


def _after_death(life: Life, event: Die, section: RunSection) -> tuple[Life, tuple[Action, ...]]:
    """Restart after a pause, `run.max_restarts` times; under `run.on_peer_loss: wait` until `run.round_timeout` after
    the first death. Otherwise give the policy up."""
    died = event.at if life.died is None or event.fresh else life.died
    life = replace(life, died=died, reason=event.reason)
    pause = back_off(life.restarts)
    peers_wait = section.on_peer_loss == "wait" and event.at + pause < died + section.round_timeout
    if life.restarts < section.max_restarts or peers_wait:
        restarting = replace(life, state=PolicyState.RESTARTING, restarts=life.restarts + 1, due=event.at + pause)
        return restarting, (Action.END, Action.RESTART)
    return replace(life, state=PolicyState.LOST), (Action.END, Action.GIVE_UP)


def back_off(restarts: int) -> float:
    """Return the seconds to wait before a policy's next restart, after `restarts` restarts."""
    return min(BACK_OFF_SECONDS * 2.0 ** min(restarts, 10), LONGEST_BACK_OFF_SECONDS)


def may_continue(others: Iterable[PolicyState], section: RunSection) -> bool:
    """Return whether the run goes on without a lost policy: `run.on_peer_loss: continue`, and another one runs or has
    finished."""
    left = any(state in ACTIVE or state is PolicyState.FINISHED for state in others)
    return section.on_peer_loss == "continue" and left


def restart_message(life: Life, step: int, section: RunSection) -> str:
    """Return the message for a policy that restarts from a step after its last death."""
    count = f"{life.restarts} of {section.max_restarts}"
    limit = "until run.round_timeout" if section.on_peer_loss == "wait" else count
    return f"{life.reason}\nRestarting in {back_off(life.restarts - 1):.0f} s from step {step} (restart {limit})"
