"""Which pair, or peer row, of a round falls on which micro-batch of which rank.

TRL permutes rows, not groups, before it slices a generation batch into optimizer steps; what joins a round is dealt
evenly over its steps instead, the same way on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A micro-batch of a round: `step` optimizer step, `micro` micro-batch within it, `rank`."""

    step: int
    micro: int
    rank: int


def deal(items: int, *, steps: int, micro_batches: int, ranks: int) -> dict[Slot, list[int]]:
    """Which item (a pair, a peer row) goes where: round-robin over the optimizer steps of the round, and within a step
    over ranks first, then micro-batches. Every slot is a key, with an empty list where nothing falls."""
    table: dict[Slot, list[int]] = {
        Slot(s, m, r): [] for s in range(steps) for m in range(micro_batches) for r in range(ranks)
    }
    for index in range(items):
        step, place = index % steps, index // steps
        table[Slot(step, (place // ranks) % micro_batches, place % ranks)].append(index)
    return table
