"""Encoding and aligning over ranks equals one rank's, bit for bit; the ranks are threads here, processes in
test_ranks.py."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import UsageError
from mutualrl.records import Rollout
from mutualrl.thl import retokenize
from mutualrl.tiny import path_of
from mutualrl.training import split_transfer
from mutualrl.training.split_transfer import SMALLEST, SplitTransfer
from mutualrl.training.transfer import TokenTransfer
from mutualrl.trajectory import Trajectory

RANKS = 3


class Ranks:
    """Collectives among threads."""

    def __init__(self) -> None:
        self.jobs = [queue.Queue[Any]() for _ in range(RANKS)]
        self.results = [queue.Queue[Any]() for _ in range(RANKS)]
        self.returned = [queue.Queue[Any]() for _ in range(RANKS)]
        self.here = threading.local()
        self.worked = [0] * RANKS

    def scatter(self, output: list[Any], jobs: Sequence[Any] | None, src: int) -> None:
        """Send each rank its object; the main rank has `jobs`."""
        if jobs is not None:
            for rank, job in enumerate(jobs):
                self.jobs[rank].put(job)
        output[0] = self.jobs[self.here.rank].get(timeout=60)

    def gather(self, value: Any, gathered: list[Any] | None, dst: int) -> None:
        """Collect each rank's object in `gathered` on the main rank."""
        self.worked[self.here.rank] += len(value)
        self.results[self.here.rank].put(value)
        if gathered is not None:
            gathered[:] = [results.get(timeout=60) for results in self.results]

    def broadcast(self, values: list[Any], from_process: int) -> list[Any]:
        """Return the main rank's values on all ranks."""
        if self.here.rank == 0:
            for returned in self.returned:
                returned.put(values)
        values[:] = self.returned[self.here.rank].get(timeout=60)
        return values


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks()
    monkeypatch.setattr(torch.distributed, "scatter_object_list", found.scatter)
    monkeypatch.setattr(torch.distributed, "gather_object", found.gather)
    monkeypatch.setattr(split_transfer, "broadcast_object_list", found.broadcast)
    return found


def transfer() -> TokenTransfer:
    peers = {"bob": load_tokenizer(str(path_of("bob")))}
    return TokenTransfer(load_tokenizer(str(path_of("ada"))), max_length=30, peers=peers)


def on_all_ranks(ranks: Ranks, compute: Callable[[SplitTransfer], Any]) -> list[Any]:
    """Run `compute` on the main rank of RANKS threads; return every rank's result."""
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        ranks.here.rank = rank
        split = SplitTransfer(transfer(), SimpleNamespace(num_processes=RANKS, is_main_process=rank == 0))  # type: ignore[arg-type]
        results[rank] = split.on_main_rank(lambda: compute(split))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    return results


def responses(count: int) -> list[tuple[str, bool]]:
    rng = random.Random(0)
    rows = []
    for number in range(count):
        text = " + ".join(str(rng.randrange(100)) for _ in range(rng.randrange(1, 12)))
        rows.append((f" {text} = {number}", number % 3 > 0))
    return rows


def test_texts_and_traces_are_those_of_one_rank(ranks: Ranks) -> None:
    rows = responses(SMALLEST * RANKS + 5)
    rows[7] = rows[3]  # a text twice
    alone, source = transfer(), load_tokenizer(str(path_of("bob")))
    expected = alone.encode(rows)
    assert 0 < alone.refused["too_long"] < len(rows)
    rollouts, ids = [], []
    for number, ((text, done), own) in enumerate(zip(rows, expected, strict=True)):
        if own is None:
            continue
        tokens = list(retokenize(text, source, ended=done).ids)
        trace = [-0.1 - 0.01 * (place % 7) for place in range(len(tokens))]
        rollouts.append(
            Rollout(
                "p",
                number,
                1.0,
                done,
                trajectory=Trajectory.of_text(text),
                token_ids=tokens,
                logprobs=trace,
                policy="bob",
            )  # type: ignore[arg-type]
        )
        ids.append(own)
    rollouts, ids = rollouts * 3, ids * 3
    aligned = alone.align(rollouts, ids, "span")

    def compute(split: SplitTransfer) -> tuple[Any, Any, int]:
        encoded = split.encode(rows)
        return encoded, split.align(rollouts, ids, "span"), split.transfer.refused["too_long"]

    for encoded, traces, refused in on_all_ranks(ranks, compute):
        for one, other in zip(encoded, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other)
        for mine, theirs in zip(traces, aligned, strict=True):
            assert mine.logprobs.tobytes() == theirs.logprobs.tobytes()
            assert (mine.covered == theirs.covered).all()
        assert refused == alone.refused["too_long"]
    assert min(ranks.worked) > 0
    assert max(ranks.worked) - min(ranks.worked) <= 2 * 2  # a part each, of both jobs


def test_few_rows_stay_on_the_main_rank(ranks: Ranks) -> None:
    rows = responses(SMALLEST * RANKS - 1)
    results = on_all_ranks(ranks, lambda split: [ids is None for ids in split.encode(rows)])
    assert results[0] == results[1] == results[2] == [ids is None for ids in transfer().encode(rows)]
    assert ranks.worked == [0] * RANKS


def test_peer_without_a_tokenizer_is_named() -> None:
    alone = SplitTransfer(transfer(), SimpleNamespace(num_processes=1, is_main_process=True))  # type: ignore[arg-type]
    unknown = Rollout(
        "p", 0, 1.0, True, trajectory=Trajectory.of_text("7"), token_ids=[1], logprobs=[-1.0], policy="eve"
    )  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no tokenizer of peer 'eve' was passed"):
        alone.align([unknown], [np.array([1], dtype=np.int32)], "span")
