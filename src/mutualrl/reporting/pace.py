"""Waiting between policies, and the time that staleness would save, simulated from rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """Timing of a run. `seconds`: until the last policy has published its last round; `waiting`: the fraction of its
    time that each policy waits."""

    seconds: float
    waiting: Mapping[str, float]


def simulate(busy: Mapping[str, Sequence[float]], staleness: int) -> Pace:
    """Return the timing of a run whose policy p is busy for `busy[p][r]` seconds in round r before publishing it.

    Policy p publishes round r at P_p(r) = S_p(r) + busy[p][r] and starts the next at S_p(r + 1) = max(P_p(r),
    max over q of P_q(r - staleness)): it continues when no peer is more than `staleness` rounds behind. Only rounds
    that all policies have are simulated; writes, reads and failures take no time. Raises ValueError without any policy
    or round.
    """
    count = min((len(rounds) for rounds in busy.values()), default=0)
    if not count:
        raise ValueError("no round to simulate; expected the seconds of at least one round per policy")
    starts = dict.fromkeys(busy, 0.0)
    waited = dict.fromkeys(busy, 0.0)
    published: list[dict[str, float]] = []
    for number in range(count):
        published.append({name: starts[name] + busy[name][number] for name in busy})
        slowest = max(published[number - staleness].values()) if number >= staleness else 0.0
        for name, at in published[number].items():
            starts[name] = max(at, slowest)
            waited[name] += starts[name] - at
    fractions = {name: waited[name] / starts[name] if starts[name] > 0 else 0.0 for name in busy}
    return Pace(max(published[-1].values()), fractions)
