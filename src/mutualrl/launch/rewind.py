"""Checkpoints from which a run can be completed: every round that a policy will read is there, or will be published.

A policy resumes from its newest checkpoint and publishes from there on; it reads its peers' rounds from its own cursor
on. If a round of a policy between the oldest cursor of its peers and its own is not in the exchange (a damaged
checkpoint or a policy's exchange was removed), its peers would wait for it until `run.round_timeout`: the policy goes
back to an older checkpoint and publishes the round again, with the same content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from rich.console import Console

from mutualrl.console.display import print_text
from mutualrl.errors import ExchangeDamagedError
from mutualrl.recipes import Recipe
from mutualrl.see import MissingPeers
from mutualrl.see.files import committed_rounds
from mutualrl.see.location import record_store
from mutualrl.storage.checkpoints import Checkpoints
from mutualrl.storage.run_info import policy_result
from mutualrl.storage.rundir import RunDirectory


def readmit(run: RunDirectory, recipe: Recipe, members: Collection[str]) -> None:
    """Let each member read peers again that it had given up: a policy from its newest checkpoint on, a source that asks
    from the oldest of its readers'."""
    readers = {source.name: recipe.readers_of(source) for source in recipe.asked_sources}
    for member in members:
        policies = readers.get(member, (member,))
        cursor = min(Checkpoints(run.policy(policy).root).newest_cursor() for policy in policies)
        MissingPeers(record_store(run), member).readmit_all(cursor)


def resume_cursors(
    cursors: Mapping[str, Sequence[int]],
    published: Mapping[str, Collection[int]],
    staleness: int = 0,
    excused: Callable[[str, str, int], bool] = lambda reader, writer, round_index: False,
) -> dict[str, int]:
    """Return the exchange cursor from which each policy resumes: the newest ones from which all rounds can be read.

    `cursors`: the cursors of each policy's checkpoints, newest first; empty: it trains from the start (cursor 0).
    `published`: the rounds in the exchange. `excused(reader, writer, round)`: whether the reader continued without that
    round. Raises ExchangeDamagedError naming a round that no checkpoint can publish again.
    """
    chosen = {policy: next(iter(own), 0) for policy, own in cursors.items()}
    while (absent := _absent_round(chosen, published, staleness, excused)) is not None:
        policy, round_index = absent
        older = [cursor for cursor in cursors[policy] if cursor <= round_index]
        if not older:
            raise ExchangeDamagedError(
                f"round {round_index} of {policy!r} is not in the exchange, another policy needs it, and {policy!r} "
                "cannot publish it again (it has finished, or has no checkpoint as old): restore its exchange or an "
                "older checkpoint, or train from the start with --clean or another --run-dir"
            )
        chosen[policy] = older[0]
    return chosen


def _absent_round(
    chosen: Mapping[str, int],
    published: Mapping[str, Collection[int]],
    staleness: int,
    excused: Callable[[str, str, int], bool],
) -> tuple[str, int] | None:
    """Return the first round of a policy before its cursor that a peer will read and that is not there."""
    for writer, cursor in chosen.items():
        for reader, first in chosen.items():
            for round_index in range(max(0, first - staleness), cursor if reader != writer else 0):
                if round_index not in published[writer] and not excused(reader, writer, round_index):
                    return writer, round_index
    return None


def rewind(run: RunDirectory, recipe: Recipe, console: Console) -> None:
    """Set aside damaged checkpoints, and those from which the run cannot be completed; say so on the console.

    Raises CheckpointDamagedError if a policy has no intact checkpoint, ExchangeDamagedError if no checkpoint helps.
    """
    info, store = run.info(), record_store(run)
    run_id = info.run_id
    markers: dict[str, dict[int, int]] = {}
    finished = set()
    per_round = recipe.steps_per_round(int(info.fingerprint.get("optimizer_steps_per_round", 1)))
    for policy in (p.name for p in recipe.policies):
        checkpoints = Checkpoints(run.policy(policy).root)
        result = policy_result(run.policy(policy).result, run.root)
        if result is not None:  # it has published every round, and needs no checkpoint
            finished.add(policy)
            markers[policy] = {result.steps: -(-result.steps // per_round)}
            continue
        newest = checkpoints.newest(run_id, policy, lambda note: print_text(console, f"Note: {note}"))
        markers[policy] = {} if newest is None else checkpoints.cursors()
    if not recipe.regime_class().needs().peers:
        return
    missing = {policy: MissingPeers(store, policy) for policy in markers}

    def excused(reader: str, writer: str, round_index: int) -> bool:
        return reader in finished or missing[reader].is_missing(writer, round_index)

    published = {policy: set(committed_rounds(store, policy)) for policy in markers}
    cursors = {policy: sorted(own.values(), reverse=True) for policy, own in markers.items()}
    chosen = resume_cursors(cursors, published, recipe.exchange.staleness, excused)
    newer = [(policy, step) for policy, own in markers.items() for step in own if own[step] > chosen[policy]]
    for policy, step in newer:
        Checkpoints(run.policy(policy).root).quarantine(step)
        print_text(
            console,
            f"Note: policy {policy!r} goes back from step {step} to an older checkpoint: rounds that its peers need "
            "are not in the exchange, and it publishes them again",
        )
