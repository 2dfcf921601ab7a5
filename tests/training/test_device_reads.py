"""Reads from the device during a round: each waits until a GPU is idle, so their number must not grow with the rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import training_harness as harness
from mutualrl.training.round import Rounds


class Operations(TorchDispatchMode):
    """Count of the operations on tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(
    tiny: dict[str, Path], root: Path, monkeypatch: pytest.MonkeyPatch, regime: str, rows: int
) -> list[Counter[str]]:
    """Return the operations with which each round of `rows` rows is collected."""
    collect, counts = Rounds.collect, []

    def counted(rounds: Rounds, *arguments: Any) -> Any:
        with Operations() as operations:
            own = collect(rounds, *arguments)
        assert len(own.rollouts) == rows
        counts.append(operations.counts)
        return own

    monkeypatch.setattr(Rounds, "collect", counted)
    prompts = harness.sampled_rounds(rows // 4, 1)
    harness.publish_rollouts(root / "exchange", harness.load_tokenizer(str(tiny["bob"])), prompts)
    sharing = harness.sharing(root / "exchange", regime)
    keys = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "max_steps": 1}
    keys |= harness.trainer_keys(regime)
    harness.train(harness.ReplayedMutual, tiny["ada"], root / "out", sharing, **keys)
    return counts


@pytest.mark.parametrize("regime", ["xgrpo", "sgt"])
def test_collecting_a_round_reads_the_device_equally_often_for_more_rows(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, regime: str
) -> None:
    with monkeypatch.context() as patch:
        few = operations(tiny, tmp_path / "few", patch, regime, 8)
    many = operations(tiny, tmp_path / "many", monkeypatch, regime, 16)
    assert few == many
    assert few[0]
