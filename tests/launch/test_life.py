"""Life of a policy: every state with every event, restarts and back-off by hand, and random lives."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.launch.life import (
    ACTIVE,
    Action,
    Begin,
    Die,
    Event,
    Finish,
    Life,
    Stop,
    Tick,
    advance,
    back_off,
    may_continue,
    restart_message,
)
from mutualrl.process.status import PolicyState
from mutualrl.recipes.schema import RunSection

STATES = [state for state in PolicyState if state is not PolicyState.UNKNOWN]
NO_RESTART, ONE_RESTART = RunSection(max_restarts=0), RunSection(max_restarts=1)
DEATH = Die(10.0, "it died", fresh=True)
EVENTS: dict[str, Event] = {
    "begin": Begin(),
    "finish": Finish(),
    "stop": Stop(),
    "die": DEATH,
    "early": Tick(19.9),
    "due": Tick(20.0),
}
#: the events that change a policy's state, and the actions; all others change neither
TRANSITIONS: dict[tuple[PolicyState, str], tuple[PolicyState, tuple[Action, ...]]] = {
    (PolicyState.STARTING, "begin"): (PolicyState.RUNNING, (Action.START,)),
    (PolicyState.STARTING, "finish"): (PolicyState.FINISHED, ()),
    (PolicyState.STARTING, "stop"): (PolicyState.STOPPED, ()),
    (PolicyState.RUNNING, "finish"): (PolicyState.FINISHED, (Action.END,)),
    (PolicyState.RUNNING, "die"): (PolicyState.RESTARTING, (Action.END, Action.RESTART)),
    (PolicyState.RESTARTING, "stop"): (PolicyState.STOPPED, ()),
    (PolicyState.RESTARTING, "due"): (PolicyState.RUNNING, (Action.START,)),
}


@pytest.mark.parametrize(("state", "name"), list(itertools.product(STATES, EVENTS)))
def test_every_state_with_every_event(state: PolicyState, name: str) -> None:
    life = Life(state, due=20.0 if state is PolicyState.RESTARTING else None)
    after, actions = advance(life, EVENTS[name], ONE_RESTART)
    assert (after.state, actions) == TRANSITIONS.get((state, name), (state, ()))
    if (state, name) not in TRANSITIONS:
        assert after == (replace(life, stopping=True) if (state, name) == (PolicyState.RUNNING, "stop") else life)


def test_death_without_a_restart_left_and_under_a_stop() -> None:
    running = Life(PolicyState.RUNNING)
    lost, actions = advance(running, DEATH, NO_RESTART)
    assert (lost.state, lost.reason, actions) == (PolicyState.LOST, "it died", (Action.END, Action.GIVE_UP))
    stopping, _ = advance(running, Stop(), ONE_RESTART)
    stopped, actions = advance(stopping, DEATH, ONE_RESTART)
    assert (stopped.state, actions) == (PolicyState.STOPPED, (Action.END,))


def test_back_off_doubles_up_to_a_minute() -> None:
    assert [back_off(restarts) for restarts in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    life, _ = advance(Life(PolicyState.RUNNING, restarts=2), DEATH, RunSection(max_restarts=5))
    assert (life.restarts, life.due, life.died) == (3, 14.0, 10.0)  # 10 s + 4 s
    message = restart_message(life, 40, RunSection(max_restarts=5))
    assert message == "it died\nRestarting in 4 s from step 40 (restart 3 of 5)"


@pytest.mark.parametrize(
    ("died", "at", "fresh", "state"),
    [
        (None, 10.0, False, PolicyState.RESTARTING),
        (10.0, 108.9, False, PolicyState.RESTARTING),  # restarts after 109.9 s, within 100 s of the first death
        (10.0, 109.0, False, PolicyState.LOST),
        (10.0, 109.0, True, PolicyState.RESTARTING),  # it had got past its start: a new series of deaths
    ],
)
def test_under_wait_restarts_end_a_round_timeout_after_the_first_death(
    died: float | None, at: float, fresh: bool, state: PolicyState
) -> None:
    section = RunSection(max_restarts=0, on_peer_loss="wait", round_timeout=100)
    life, _ = advance(Life(PolicyState.RUNNING, died=died), Die(at, "it died", fresh), section)
    assert life.state is state
    if state is PolicyState.RESTARTING:
        assert restart_message(life, 0, section).endswith("(restart until run.round_timeout)")


def test_run_goes_on_without_a_lost_policy_only_under_continue_and_beside_another() -> None:
    section = RunSection(on_peer_loss="continue")
    assert may_continue([PolicyState.LOST, PolicyState.FINISHED], section)
    assert may_continue([PolicyState.RESTARTING], section)
    assert not may_continue([PolicyState.LOST, PolicyState.STOPPED], section)
    assert not may_continue([PolicyState.RUNNING], RunSection(on_peer_loss="fail"))


@given(
    st.lists(
        st.one_of(
            st.just(Begin()),
            st.just(Finish()),
            st.just(Stop()),
            st.builds(Die, st.floats(0, 1e4), st.just("it died"), st.booleans()),
            st.builds(Tick, st.floats(0, 1e4)),
        ),
        max_size=40,
    ),
    st.integers(0, 3),
)
def test_random_lives(events: list[Event], max_restarts: int) -> None:
    """An attempt starts only if none runs, final states stay, and no policy restarts too often."""
    section, life, running = RunSection(max_restarts=max_restarts), Life(), False
    for event in events:
        before = life
        life, actions = advance(life, event, section)
        for action in actions:
            assert action is not Action.START or not running
            running = action is Action.START or (running and action is not Action.END)
        assert running == (life.state is PolicyState.RUNNING)
        assert (life.due is not None) == (life.state is PolicyState.RESTARTING)
        assert before.state in ACTIVE or life == before
    assert life.restarts <= max_restarts
