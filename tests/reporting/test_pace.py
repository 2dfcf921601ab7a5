"""Simulated timing of a run's rounds, against hand calculations and an event queue."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence

import pytest

from mutualrl.reporting.pace import simulate


def test_two_policies_match_a_hand_calculation() -> None:
    """Rounds of 1 and 2 s: at the barrier the fast policy waits half of its time; one round of slack saves one
    round's wait at the beginning and nothing later."""
    busy = {"ada": [1.0] * 4, "bob": [2.0] * 4}
    assert simulate(busy, 0).seconds == 8.0
    assert simulate(busy, 0).waiting == {"ada": 0.5, "bob": 0.0}
    assert simulate(busy, 1).seconds == 8.0  # slack does not compensate for a lasting difference
    assert simulate(busy, 4).waiting == {"ada": 0.0, "bob": 0.0}


def test_slack_evens_out_uneven_rounds() -> None:
    """With alternating slow rounds: 12 s at the barrier, 8 s with one round of slack."""
    busy = {"ada": [1.0, 3.0, 1.0, 3.0], "bob": [3.0, 1.0, 3.0, 1.0]}
    assert simulate(busy, 0).seconds == 12.0
    assert simulate(busy, 1).seconds == 8.0


def by_events(busy: Mapping[str, Sequence[float]], staleness: int) -> float:
    """Return the time of the last publication, from an event queue: a policy begins round r (from 0) once every
    policy has published r - `staleness` rounds."""
    rounds = min(map(len, busy.values()))
    published = dict.fromkeys(busy, 0)
    waiting: set[str] = set()
    queue = [(seconds[0], name) for name, seconds in busy.items()]
    heapq.heapify(queue)
    now = 0.0
    while queue:
        now, name = heapq.heappop(queue)
        published[name] += 1
        waiting.add(name)
        for policy in sorted(waiting):
            if published[policy] < rounds and min(published.values()) >= published[policy] - staleness:
                waiting.remove(policy)
                heapq.heappush(queue, (now + busy[policy][published[policy]], policy))
    return now


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 50])
def test_simulation_agrees_with_an_event_queue(staleness: int) -> None:
    draw = random.Random(staleness)
    busy = {name: [draw.expovariate(1.0) for _ in range(40)] for name in ("ada", "bob", "cyd", "dee")}
    simulated = simulate(busy, staleness)
    assert simulated.seconds == pytest.approx(by_events(busy, staleness))
    assert simulated.seconds >= max(sum(rounds) for rounds in busy.values()) - 1e-9
    assert all(0 <= fraction < 1 for fraction in simulated.waiting.values())


def test_more_slack_is_never_slower() -> None:
    draw = random.Random(7)
    busy = {name: [draw.expovariate(1.0) for _ in range(60)] for name in ("ada", "bob", "cyd")}
    seconds = [simulate(busy, staleness).seconds for staleness in range(10)]
    assert seconds == sorted(seconds, reverse=True)


def test_simulating_no_rounds_is_rejected() -> None:
    with pytest.raises(ValueError, match="no round"):
        simulate({"ada": [], "bob": [1.0]}, 0)
