"""What training does not wait for: in order, done by the end of the step, and never lost in silence."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.training.background import Background
from mutualrl.training.rescues import RescueLog
from training_harness import ReplayedMutual, publish_rollouts, sampled_rounds, sharing, train


def test_jobs_run_in_order_beside_their_caller() -> None:
    background, done, gate = Background(), [], threading.Event()
    background.run(lambda: done.append(gate.wait(10)))
    background.run(lambda: done.append("second"))
    assert done == []  # the caller goes on
    gate.set()
    background.finish()
    assert done == [True, "second"]
    background.finish()


def test_what_a_job_raises_is_raised_once() -> None:
    background = Background()

    def fails() -> None:
        raise OSError(28, "No space left on device")

    background.run(fails)
    with pytest.raises(OSError, match="No space left"):
        background.finish()
    background.finish()


@pytest.mark.slow
def test_log_of_rescues_that_cannot_be_written_ends_the_step(tiny: dict[str, Path], tmp_path: Path) -> None:
    publish_rollouts(tmp_path / "x", load_tokenizer(str(tiny["bob"])), sampled_rounds(8, 1))
    shared = replace(sharing(tmp_path / "x", "sgt"), rescues=RescueLog(tmp_path / "absent" / "rescues.jsonl"))
    with pytest.raises(FileNotFoundError, match="absent"):
        train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, max_steps=1)
