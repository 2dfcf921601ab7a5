"""The frame of a run's metrics: what counts as measured, and how it is looked up."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from made_runs import made_run, validation
from mutualrl.runs.logs import LEVELS, points, read_logged
from mutualrl.runs.overview import read_overview
from mutualrl.storage.files import write_checksummed


def written(run: Path, *lines: str) -> Path:
    """Write the lines of ada's metrics.jsonl."""
    (run / "policies" / "ada" / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    "value", ["null", '"0.5"', "true", "[0.5]", "{}", "1e101", "-1e101", str(10**400)], ids=lambda value: value[:8]
)
def test_what_is_no_finite_number_was_not_measured(tmp_path: Path, value: str) -> None:
    """It has no row: it is not 0, and nothing is interpolated."""
    rows = ('{"step": 1, "reward": 1.0}', f'{{"step": 2, "reward": {value}, "kl": 0.5}}', '{"step": 3, "reward": 4}')
    run = read_logged(written(made_run(tmp_path / "r", finished=False), *rows))
    assert points(run.series("ada", "reward")) == [(1, 1.0), (3, 4.0)]
    assert run.total("ada", "reward") == 5.0
    assert points(run.series("ada", "kl")) == [(2, 0.5)]
    assert not run.metrics.isna().any()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400"])
def test_line_that_is_no_json_is_left_out_and_noted(tmp_path: Path, value: str) -> None:
    rows = ('{"step": 1, "reward": 1.0}', f'{{"step": 2, "reward": {value}, "kl": 0.5}}')
    run = read_logged(written(made_run(tmp_path / "r", finished=False), *rows))
    assert points(run.series("ada", "reward")) == [(1, 1.0)]
    assert run.series("ada", "kl").empty
    assert any("1 lines are not valid records (2)" in note for note in run.notes)


def test_frame_has_one_sorted_value_per_policy_metric_and_step(tmp_path: Path) -> None:
    rows = ('{"step": 2, "reward": 2.0}', '{"step": 1, "reward": 1.0}', '{"step": 2, "reward": 3.0}')
    run = read_logged(written(made_run(tmp_path / "r", finished=False), *rows))
    assert list(run.metrics.index.names) == LEVELS
    assert run.metrics.index.is_unique
    assert run.metrics.index.is_monotonic_increasing
    assert points(run.series("ada", "reward")) == [(1, 1.0), (2, 3.0)]  # of a step that is logged twice, the last
    table = run.metrics.reset_index()
    assert list(table) == [*LEVELS, "value"]
    assert isinstance(table, pd.DataFrame)


def test_what_was_never_measured_is_empty(tmp_path: Path) -> None:
    run = read_logged(made_run(tmp_path / "r", "grpo"))
    for empty in (run.series("ada", "nothing"), run.series("nobody", "reward"), run.by_role("ada", "gate_rate")):
        assert points(empty) == []
        assert empty.index.name == "step"
    assert run.total("ada", "nothing") == 0.0
    assert run.groups("nobody") == []
    assert run.steps == {"ada": 20, "bob": 20}


def test_validations_are_before_during_and_after_training(tmp_path: Path) -> None:
    run = read_logged(made_run(tmp_path / "r"))
    assert run.accuracy_of("ada").index.tolist() == [0, 5, 10, 15, 20]
    assert run.accuracy_of("ada")[0] == pytest.approx(0.3)
    assert run.accuracy_of("ada", "+")[20] == pytest.approx(0.6)
    assert run.groups("ada") == ["*", "+"]


def test_validation_without_any_reward_is_not_measured(tmp_path: Path) -> None:
    root = made_run(tmp_path / "r", finished=False)
    row = {"step": 1, "reward": 1.0, "validation": {**validation(0.0), "unscorable": 64}}
    written(root, json.dumps(row), json.dumps({"step": 2, "validation": {**validation(0.5), "unscorable": 3}}))
    write_checksummed(root / "policies" / "ada" / "before.json", {**validation(0.0), "unscorable": 64}, root=root)
    assert points(read_logged(root).accuracy_of("ada")) == [(2, 0.5)]


def test_validation_that_is_none_is_left_out_and_noted(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        *({"step": step, "reward": 1.0, "validation": {"accuracy": "high"}} for step in range(1, 8)),
        {"step": 8, "validation": validation(0.5)},
    ]
    run = read_logged(written(made_run(tmp_path / "r", finished=False), *map(json.dumps, rows)))
    assert [step for step, _ in points(run.accuracy_of("ada")) if step] == [8]
    assert len(run.series("ada", "reward")) == 7
    note = "policies/ada/metrics.jsonl: 7 validations are not valid (step 1, 2, 3, 4, 5, ...) and are left out"
    assert note in run.notes


def test_last_validation_of_a_finished_policy_is_its_results(tmp_path: Path) -> None:
    root = made_run(tmp_path / "r")
    rows = [json.loads(line) for line in (root / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["validation"] = {"accuracy": "high"}
    run = read_logged(written(root, *map(json.dumps, rows)))
    assert run.accuracy_of("ada").index[-1] == rows[-1]["step"]
    assert not any("not valid" in note for note in run.notes)


def test_run_without_policies_has_an_empty_frame(tmp_path: Path) -> None:
    run = read_logged(made_run(tmp_path / "r", policies=()))
    assert len(run.metrics) == 0
    assert any("no policies" in note for note in run.notes)


@pytest.mark.parametrize("step", [2**70, -1, "1", True, None])
def test_step_that_is_none_is_a_damaged_line(tmp_path: Path, step: object) -> None:
    rows = ('{"step": 1, "reward": 1.0}', json.dumps({"step": step, "reward": 2.0}))
    run = read_logged(written(made_run(tmp_path / "r", finished=False), *rows))
    assert points(run.series("ada", "reward")) == [(1, 1.0)]
    assert any("1 lines are not valid records (2)" in note for note in run.notes)
    assert read_overview(run.root).policies["ada"].step == 1


def test_names_with_lone_surrogates_and_groups_without_a_number(tmp_path: Path) -> None:
    groups = {"a\ud800": 0.25, "b": None, "c": 0.75}
    row = {"step": 1, "x\ud800": 1.0, "validation": {"accuracy": 0.5, "by_group": groups}}
    run = read_logged(written(made_run(tmp_path / "r", finished=False), json.dumps(row)))
    assert points(run.series("ada", "x?")) == [(1, 1.0)]
    assert points(run.accuracy_of("ada", "a?")) == [(1, 0.25)]
    assert points(run.accuracy_of("ada", "b"))[1:] == []  # before training only, if at all
    assert points(run.accuracy_of("ada"))[-1] == (1, 0.5)
