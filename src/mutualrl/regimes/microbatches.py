"""Assignment of a round's extra rows to the micro-batches of each rank.

TRL permutes rows, not groups, before it slices a generation batch into optimizer steps; extra rows are distributed
evenly over the steps instead, identically on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicrobatchSlot:
    """Micro-batch of a round: optimizer step `step`, its micro-batch `micro`, on `rank`."""

    step: int
    micro: int
    rank: int


def assign_to_microbatches(
    items: int, *, steps: int, micro_batches: int, ranks: int
) -> dict[MicrobatchSlot, list[int]]:
    """Assign items 0..items - 1: round-robin over the optimizer steps of the round, and within a step over ranks first,
    then micro-batches. Every slot is a key, with an empty list if it has no items."""
    table: dict[MicrobatchSlot, list[int]] = {}
    for step in range(steps):
        for micro in range(micro_batches):
            for rank in range(ranks):
                table[MicrobatchSlot(step, micro, rank)] = []
    for index in range(items):
        step, position = index % steps, index // steps
        table[MicrobatchSlot(step, (position // ranks) % micro_batches, position % ranks)].append(index)
    return table
