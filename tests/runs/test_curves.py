"""Curves over steps and seeds, against hand calculations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from made_runs import edit_recipe, made_run
from mutualrl.reporting import single_run
from mutualrl.reporting.report_tables import sampled_tokens
from mutualrl.runs.curves import (
    busy_seconds,
    first_reaching,
    mean,
    mean_bars,
    mean_curve,
    series,
    smooth,
    tokens_per_second,
    window_of,
)
from mutualrl.runs.logs import Series, points, read_logged


def values(*numbers: float, start: int = 1) -> Series:
    return series(dict(enumerate(numbers, start)))


def rewrite(run: Path, policy: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of a policy's metrics.jsonl."""
    path = run / "policies" / policy / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_mean_and_sample_standard_deviation_at_common_steps() -> None:
    drawn = mean_curve([values(1.0, 2.0, 3.0), values(3.0, 6.0), values()])
    assert drawn.index.tolist() == [1, 2]
    assert drawn["value"].tolist() == [2.0, 4.0]
    assert (drawn["high"] - drawn["value"]).tolist() == pytest.approx([math.sqrt(2), math.sqrt(8)])
    assert (drawn["value"] - drawn["low"]).tolist() == pytest.approx([math.sqrt(2), math.sqrt(8)])
    assert len(mean_curve([])) == 0
    assert list(mean_curve([values(1.0)])) == ["value"]  # one run has no band


def test_moving_mean_is_over_the_available_points() -> None:
    numbers = [float(number % 7) for number in range(60)]  # a window of three
    expected = [sum(numbers[max(0, i - 1) : i + 2]) / len(numbers[max(0, i - 1) : i + 2]) for i in range(60)]
    assert smooth(values(*numbers)).tolist() == pytest.approx(expected)
    assert points(smooth(values(1.0, 2.0))) == [(1, 1.0), (2, 2.0)]
    assert [window_of(n) for n in (0, 19, 40, 160, 1000)] == [1, 1, 3, 9, 51]


def test_means_and_first_step_that_reaches_a_value() -> None:
    assert points(mean([values(1.0, 2.0), values(3.0, 4.0)])) == [(1, 2.0), (2, 3.0)]
    assert points(mean([values(1.0), values()])) == []
    assert points(mean([])) == []
    assert first_reaching(values(0.1, 0.5, 0.4), 0.45) == 2
    assert first_reaching(values(0.1), 0.45) is None


def test_bars_have_an_error_where_there_are_several_values() -> None:
    bars = mean_bars({"a": [1.0, 3.0], "b": [5.0], "c": []})
    assert bars.index.tolist() == ["a", "b"]
    assert bars["value"].tolist() == [2.0, 5.0]
    assert bars["error"]["a"] == pytest.approx(math.sqrt(2))
    assert math.isnan(bars["error"]["b"])


def test_tokens_per_second_are_a_steps_tokens_over_its_time(tmp_path: Path) -> None:
    run = read_logged(made_run(tmp_path / "r"))
    assert tokens_per_second(run, "ada").tolist() == [2000.0] * 20
    assert tokens_per_second(run, "ada", without_validation=True).index.tolist() == [
        step for step in range(1, 21) if step not in (5, 10, 15)
    ]


@pytest.mark.parametrize("lost", [6, 5])  # in the round that begins at step 5, and that step itself
def test_round_of_several_steps_and_a_lost_line_do_not_inflate_the_speed(tmp_path: Path, lost: int) -> None:
    """Which step generated is not known of a lost line: the next round's count may be that of two."""

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:  # TRL counts tokens at the steps that generate: every fourth here
            if row["step"] % 4 != 1:
                del row["num_tokens"]
            else:
                row["num_tokens"] = 1000.0 * (row["step"] + 3) / 4
        del rows[lost - 1]

    rewrite(made_run(tmp_path / "r"), "ada", change)
    run = read_logged(tmp_path / "r")
    kept = [1, 13, 17] if lost == 6 else [13, 17]
    assert points(tokens_per_second(run, "ada")) == [(step, 500.0) for step in kept]
    assert tokens_per_second(run, "ada", without_validation=True).index.tolist() == [s for s in kept if s != 13]


def test_round_of_several_steps_is_timed_without_its_wait(tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        shared = {"step_time": 2.0, "see/wait_seconds": 0.5}
        rows[:] = [{"step": 1, **shared}, {"step": 2, "step_time": 1.0}, {"step": 3, **shared}]

    run = made_run(tmp_path / "r")
    rewrite(run, "ada", change)
    rewrite(run, "bob", lambda rows: rows[1].pop("step_time"))
    logged = read_logged(run)
    assert busy_seconds(logged, "ada") == [2.5, 1.5]
    assert busy_seconds(logged, "bob") == []  # a step without a time


def test_arm_is_the_regime_with_its_non_default_settings(tmp_path: Path) -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("sgt", {}),
        ("sgt", {"weight": 0.3, "teacher": "source"}),
        ("prp", {"denominator": "snapshot"}),
        ("odd", {}),
    ]
    arms = []
    for number, (regime, settings) in enumerate(runs):
        arms.append(read_logged(made_run(tmp_path / f"r{number}", regime, settings=settings)).arm)
    assert arms == ["sgt", "sgt (teacher=source, weight=0.3)", "prp (denominator=snapshot)", "odd"]


@pytest.mark.parametrize(("attempts", "arm"), [(3, "grpo resampled"), (5, "grpo resampled (max_attempts=5)")])
def test_run_with_dynamic_sampling_is_an_arm_of_its_own_and_its_tokens_are_those_sampled(
    tmp_path: Path, attempts: int, arm: str
) -> None:
    run = made_run(tmp_path / "r", "grpo", steps=2, finished=False)
    edit_recipe(run, lambda recipe: recipe.update(round={"resample": {"max_attempts": attempts}}))

    def change(rows: list[dict[str, Any]]) -> None:
        for row, length, further in zip(rows, (10.0, 8.0), (2.0, 0.0), strict=True):
            row |= {"completions/mean_length": length, "resample/attempts": further}

    rewrite(run, "ada", change)
    logged = read_logged(run)
    assert logged.arm == arm
    assert sampled_tokens(logged, "ada").to_dict() == {1: 3 * 10 * 32, 2: 3 * 10 * 32 + 8 * 32}
    assert sampled_tokens(logged, "bob").empty
    assert [figure.name for figure in single_run.figures(logged) if figure.name == "resampling"] == ["resampling"]
    assert "resampling" not in [figure.name for figure in single_run.figures(read_logged(made_run(tmp_path / "s")))]


def test_vllm_sampling_metrics_are_drawn(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt")
    assert "engine" not in [figure.name for figure in single_run.figures(read_logged(run))]
    for policy in ("ada", "bob"):
        path = run / "policies" / policy / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ratios = {f"sampling/importance_sampling_ratio/{kind}": value for kind, value in (("mean", 0.98), ("min", 0.5))}
        sampling_metrics = {**ratios, "sampling/sampling_logp_difference/mean": 0.01}
        path.write_text("".join(json.dumps({**row, **sampling_metrics}) + "\n" for row in rows))
    (drawn,) = [figure for figure in single_run.figures(read_logged(run)) if figure.name == "engine"]
    assert [{line["value"].iloc[0] for line in panel.lines.values()} for panel in drawn.panels] == [
        {0.01},
        {0.98},
        {0.5},
    ]
