"""Assignment of extra rows to microbatches: which extra row of a round falls on which micro-batch of which rank.

TRL permutes rows, not groups, before it slices a generation batch into optimizer steps; what joins a round is assigned
evenly over its steps instead, the same way on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicrobatchSlot:
    """Micro-batch of a round: `step` optimizer step, `micro` micro-batch within it, `rank`."""

    step: int
    micro: int
    rank: int


def assign_to_microbatches(
    items: int, *, steps: int, micro_batches: int, ranks: int
) -> dict[MicrobatchSlot, list[int]]:
    """Assign items 0..items - 1: round-robin over the optimizer steps of the round, and within a step over ranks first,
    then micro-batches. Every slot is a key, with an empty list where nothing falls."""
    table: dict[MicrobatchSlot, list[int]] = {}
    for step in range(steps):
        for micro in range(micro_batches):
            for rank in range(ranks):
                table[MicrobatchSlot(step, micro, rank)] = []
    for index in range(items):
        step, place = index % steps, index // steps
        table[MicrobatchSlot(step, (place // ranks) % micro_batches, place % ranks)].append(index)
    return table
