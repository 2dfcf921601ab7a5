"""The rounds of a run timed again: worked by hand, and against a simulation by events."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence

import pytest

from mutualrl.regimes.info import RegimeInfo
from mutualrl.reporting.pace import busy_seconds, simulate
from mutualrl.reporting.run_reader import PolicyRun


def test_two_policies_by_hand() -> None:
    """Rounds of 1 and 2 seconds: at the barrier the fast one waits half of its time; one round of slack saves one
    round's wait at the beginning and nothing after."""
    busy = {"ada": [1.0] * 4, "bob": [2.0] * 4}
    assert simulate(busy, 0).seconds == 8.0
    assert simulate(busy, 0).waiting == {"ada": 0.5, "bob": 0.0}
    assert simulate(busy, 1).seconds == 8.0  # a lasting difference is not made up for
    assert simulate(busy, 4).waiting == {"ada": 0.0, "bob": 0.0}


def test_uneven_rounds_are_evened_out() -> None:
    """Slow rounds that take turns: 12 s at the barrier, 8 s with one round of slack."""
    busy = {"ada": [1.0, 3.0, 1.0, 3.0], "bob": [3.0, 1.0, 3.0, 1.0]}
    assert simulate(busy, 0).seconds == 12.0
    assert simulate(busy, 1).seconds == 8.0


def by_events(busy: Mapping[str, Sequence[float]], staleness: int) -> float:
    """Return when the last round is published, by a queue of publications: a policy begins a round when all rounds
    before it that are older than the slack allows are there."""
    rounds = min(map(len, busy.values()))
    done = dict.fromkeys(busy, 0)
    waiting: set[str] = set()
    queue = [(each[0], name) for name, each in busy.items()]
    heapq.heapify(queue)
    now = 0.0
    while queue:
        now, name = heapq.heappop(queue)
        done[name] += 1
        waiting.add(name)
        for each in sorted(waiting):
            if done[each] < rounds and min(done.values()) >= done[each] - staleness:
                waiting.remove(each)
                heapq.heappush(queue, (now + busy[each][done[each]], each))
    return now


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 50])
def test_a_simulation_by_events_agrees(staleness: int) -> None:
    draw = random.Random(staleness)
    busy = {name: [draw.expovariate(1.0) for _ in range(40)] for name in ("ada", "bob", "cyd", "dee")}
    simulated = simulate(busy, staleness)
    assert simulated.seconds == pytest.approx(by_events(busy, staleness))
    assert simulated.seconds >= max(sum(rounds) for rounds in busy.values()) - 1e-9
    assert all(0 <= share < 1 for share in simulated.waiting.values())


def test_more_slack_is_never_slower() -> None:
    draw = random.Random(7)
    busy = {name: [draw.expovariate(1.0) for _ in range(60)] for name in ("ada", "bob", "cyd")}
    seconds = [simulate(busy, staleness).seconds for staleness in range(10)]
    assert seconds == sorted(seconds, reverse=True)


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(ValueError, match="no round"):
        simulate({"ada": [], "bob": [1.0]}, 0)


def test_a_round_of_several_steps_is_timed_without_its_wait() -> None:
    def policy(*rows: dict[str, float]) -> PolicyRun:
        metrics = tuple({"step": step, **row} for step, row in enumerate(rows, 1))
        return PolicyRun("ada", "tiny:ada", metrics, (), None, None, RegimeInfo.from_run({}))

    shared = {"step_time": 2.0, "see/wait_seconds": 0.5}
    assert busy_seconds(policy(shared, {"step_time": 1.0}, shared)) == [2.5, 1.5]
    assert busy_seconds(policy(shared, {"loss": 1.0})) == []
