"""Curves over steps and seeds, against hand calculations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from made_runs import made_run
from mutualrl.reporting import single_run
from mutualrl.reporting.run_reader import Point, read_run
from mutualrl.reporting.series import (
    cumulative,
    first_reaching,
    mean_of,
    over_runs,
    smoothed,
    tokens_per_second,
    window_of,
)


def points(*values: float, start: int = 1) -> list[Point]:
    return [Point(step, value) for step, value in enumerate(values, start)]


def test_mean_and_sample_standard_deviation_at_common_steps() -> None:
    curve = over_runs([points(1.0, 2.0, 3.0), points(3.0, 6.0), []])
    assert curve.steps == (1, 2)
    assert curve.mean == (2.0, 4.0)
    assert curve.spread == pytest.approx((math.sqrt(2), math.sqrt(8)))
    assert curve.runs == 2
    assert over_runs([]).steps == ()
    assert over_runs([points(1.0)]).spread == (0.0,)


def test_moving_mean_is_over_the_available_points() -> None:
    assert [p.value for p in smoothed(points(0.0, 3.0, 6.0, 9.0), 3)] == [1.5, 3.0, 6.0, 7.5]
    assert smoothed(points(1.0, 2.0), 1) == points(1.0, 2.0)
    assert [window_of(n) for n in (0, 19, 40, 160, 1000)] == [1, 1, 3, 9, 51]


def test_sums_means_and_first_step_that_reaches_a_value() -> None:
    assert cumulative(points(1.0, 2.0, 3.0)) == points(1.0, 3.0, 6.0)
    assert mean_of([points(1.0, 2.0), points(3.0, 4.0)]) == points(2.0, 3.0)
    assert mean_of([points(1.0), []]) == []
    assert first_reaching(points(0.1, 0.5, 0.4), 0.45) == 2
    assert first_reaching(points(0.1), 0.45) is None


def test_tokens_per_second_are_a_steps_tokens_over_its_time(tmp_path: Path) -> None:
    policy = read_run(made_run(tmp_path / "r")).policies["ada"]
    assert [p.value for p in tokens_per_second(policy)] == [2000.0] * 20
    assert [p.step for p in tokens_per_second(policy, without_validation=True)] == [
        step for step in range(1, 21) if step not in (5, 10, 15)
    ]


def test_arm_is_the_regime_with_its_non_default_settings(tmp_path: Path) -> None:
    runs: list[tuple[str, dict[str, object]]] = [
        ("sgt", {}),
        ("sgt", {"weight": 0.3, "teacher": "source"}),
        ("prp", {"denominator": "snapshot"}),
        ("odd", {}),
    ]
    arms = []
    for number, (regime, settings) in enumerate(runs):
        arms.append(read_run(made_run(tmp_path / f"r{number}", regime, settings=settings)).arm)
    assert arms == ["sgt", "sgt (teacher=source, weight=0.3)", "prp (denominator=snapshot)", "odd"]


def test_round_of_several_steps_and_a_lost_line_do_not_inflate_the_speed(tmp_path: Path) -> None:
    import json

    path = made_run(tmp_path / "r") / "policies" / "ada" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:  # TRL counts tokens at the steps that generate: every fourth here
        if row["step"] % 4 != 1:
            del row["num_tokens"]
        else:
            row["num_tokens"] = 1000.0 * (row["step"] + 3) / 4
    del rows[5]  # in the second round
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = read_run(tmp_path / "r").policies["ada"]
    assert tokens_per_second(policy) == [Point(1, 500.0), Point(9, 500.0), Point(13, 500.0), Point(17, 500.0)]
    assert [p.step for p in tokens_per_second(policy, without_validation=True)] == [1, 17]


def test_vllm_sampling_metrics_are_drawn(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt")
    assert "engine" not in [figure.name for figure in single_run.figures(read_run(run))]
    for policy in ("ada", "bob"):
        path = run / "policies" / policy / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ratios = {f"sampling/importance_sampling_ratio/{kind}": value for kind, value in (("mean", 0.98), ("min", 0.5))}
        sampling_metrics = {**ratios, "sampling/sampling_logp_difference/mean": 0.01}
        path.write_text("".join(json.dumps({**row, **sampling_metrics}) + "\n" for row in rows))
    (drawn,) = [figure for figure in single_run.figures(read_run(run)) if figure.name == "engine"]
    assert [{line.y[0] for line in panel.lines} for panel in drawn.panels] == [{0.01}, {0.98}, {0.5}]


def test_panels_of_zeros_are_named_and_not_drawn(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt")
    for policy in ("ada", "bob"):
        path = run / "policies" / policy / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "ppo_kl": 0.0, "entropy": 0.5}) + "\n" for row in rows))
    figures = single_run.figures(read_run(run))
    titles = [panel.title for figure in figures for panel in figure.panels]
    assert "PPO KL" not in titles
    assert "entropy" in titles
    assert "Zero throughout and not drawn: PPO KL" in figures[0].caption
