"""Who waits for whom, and what letting peers be behind would save: the rounds of a run, timed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mutualrl.reporting.run_reader import PolicyRun
from mutualrl.storage.files import finite_number

WAIT = "see/wait_seconds"


@dataclass(frozen=True, slots=True)
class Pace:
    """Course of a run. `seconds`: until its last policy has published its last round; `waiting`: the share of its own
    time that each policy waits."""

    seconds: float
    waiting: Mapping[str, float]


def busy_seconds(policy: PolicyRun) -> list[float]:
    """Return the seconds of each of a policy's rounds without waiting: the `step_time` of its optimizer steps, which
    has generation in it and validation not, less what it waited. Empty where a step lacks its time."""
    rounds: list[float] = []
    for row in policy.metrics:
        seconds, waited = finite_number(row.get("step_time")), finite_number(row.get(WAIT))
        if seconds is None:
            return []
        if waited is not None:
            rounds.append(0.0)
        if rounds:
            rounds[-1] += seconds - (waited or 0.0)
    return rounds


def simulate(busy: Mapping[str, Sequence[float]], staleness: int) -> Pace:
    """Return the course of a run whose policies are busy for `busy[p][r]` seconds in round r before they publish it.

    Policy p publishes round r at P_p(r) = S_p(r) + busy[p][r] and begins the next at S_p(r + 1) = max(P_p(r),
    max over q of P_q(r - staleness)): it continues when no peer is more than `staleness` rounds behind. Rounds that not
    all policies have are left out. Writing, reading and a failure take no time here. Raises ValueError where there is
    no policy or no round.
    """
    count = min((len(rounds) for rounds in busy.values()), default=0)
    if not count:
        raise ValueError("no round to simulate; expected the seconds of one round of each policy at least")
    begins = dict.fromkeys(busy, 0.0)
    waited = dict.fromkeys(busy, 0.0)
    published: list[dict[str, float]] = []
    for number in range(count):
        published.append({name: begins[name] + busy[name][number] for name in busy})
        slowest = max(published[number - staleness].values()) if number >= staleness else 0.0
        for name, at in published[number].items():
            begins[name] = max(at, slowest)
            waited[name] += begins[name] - at
    shares = {name: waited[name] / begins[name] if begins[name] > 0 else 0.0 for name in busy}
    return Pace(max(published[-1].values()), shares)
