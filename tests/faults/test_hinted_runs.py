"""The rule `hinted` as a run: SIGKILL while it samples, and two ranks under ZeRO-3."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import PATIENCE
from runs import SHORT, FinishedRun, Run, members, stop_at, stopped, verify_intact, wait_until

HINTED = ("--regime", "hinted", "--pool", "tiny-hints", "--set", "regime.samples=2")
#: TRL generates twice per round here: own rollouts, then the samples of the regime
IN_THE_SAMPLES = "in-generation:ivy:3"
AFTER_THE_SAMPLES = "after-generation:ivy:1"


def finished(run: Run) -> FinishedRun:
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()[-3000:]
    return run


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nll", "policy_gradient"])
def test_a_run_that_is_killed_while_it_samples_with_hints_resumes_to_the_same_bytes(tmp_path: Path, loss: str) -> None:
    options = (*SHORT, "--set", f"regime.loss={loss}", "--set", "run.max_restarts=9")
    (tmp_path / "a").mkdir()
    unbroken = finished(Run(tmp_path / "a", *options, of=HINTED))
    environment = stop_at(IN_THE_SAMPLES, AFTER_THE_SAMPLES, mark=tmp_path / "mark")
    (tmp_path / "b").mkdir()
    run = Run(tmp_path / "b", *options, of=HINTED, **environment)
    try:
        stopped(tmp_path / "mark", run, 0).kill()
        stopped(tmp_path / "mark", run, 1)
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", **environment)
        finished(run)
    finally:
        run.end()
    assert verify_intact(run.path)["damaged"] == []
    assert run.weights() == unbroken.weights()
    for policy in ("hal", "ivy"):
        rescues = [each.path / "policies" / policy / "rescues.jsonl" for each in (run, unbroken)]
        assert rescues[0].read_bytes() == rescues[1].read_bytes()
        for key in ("loss", "reward", "hinted/samples", "hinted/confirmed", "hinted/hint_nll"):
            assert [row.get(key) for row in run.metrics(policy)] == [row.get(key) for row in unbroken.metrics(policy)]
    assert sum(row["hinted/confirmed"] for row in run.metrics("ivy") if "hinted/confirmed" in row) > 0
