"""Outcomes of finished runs, read from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from made_runs import made_run, validation
from mutualrl.runs.logs import read_logged
from mutualrl.storage.files import read_checksummed, write_checksummed
from mutualrl.study.comparison import compare, markdown
from mutualrl.study.outcomes import Outcome, Outcomes, PolicyOutcome, of_run


def update_result(run: Path, policy: str, **values: Any) -> None:
    path = run / "policies" / policy / "result.json"
    result = read_checksummed(path, root=run)
    assert result is not None
    write_checksummed(path, {**result, **values}, root=run)


def test_retained_is_the_fraction_of_solved_prompts_that_stay_solved(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "grpo")
    before, after = {**validation(0.3), "solved": "11010"}, {**validation(0.5), "solved": "10011"}
    update_result(run, "ada", initial_validation=before, validation=after)
    update_result(run, "bob", initial_validation={**before, "solved": "00000"}, validation=after)
    policies = of_run(read_logged(run), "p", "a").policies
    assert policies["ada"].retained == pytest.approx(2 / 3)
    assert policies["bob"].retained is None  # no solved prompt to retain


def test_retained_is_none_if_the_run_does_not_record_solved_prompts(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "grpo")
    assert of_run(read_logged(run), "p", "a").policies["ada"].retained is None
    update_result(run, "ada", initial_validation={**validation(0.3), "solved": "11"}, validation=validation(0.3))
    assert of_run(read_logged(run), "p", "a").policies["ada"].retained is None


def test_lesson_nll_is_the_mean_over_the_first_tenth_of_steps_with_a_lesson(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "sgt", steps=40)
    metrics = run / "policies" / "ada" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for number, row in enumerate(rows[5:35]):  # thirty steps with a lesson; the first tenth is three steps
        row["sgt/nll"] = 2.0 - 0.1 * number
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policies = of_run(read_logged(run), "p", "a").policies
    assert policies["ada"].lesson_nll == pytest.approx((2.0 + 1.9 + 1.8) / 3)
    assert policies["bob"].lesson_nll is None


def test_pass_at_k_is_read_from_the_runs_evaluations(tmp_path: Path) -> None:
    run = made_run(tmp_path / "r", "grpo")
    (run / "evaluations").mkdir()
    models = {"ada": {"pass_at_k": {"1": 0.25, "2": 0.4}}, "bob": {"accuracy": 0.5}}
    value = {"suite": "arithmetic", "tasks": {"arithmetic": {"n": 8}}, "models": models}
    write_checksummed(run / "evaluations" / "arithmetic.json", value, root=run)
    outcome = of_run(read_logged(run), "p", "a")
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))).policies["ada"].pass_at == {"1": 0.25, "2": 0.4}
    outcomes = Outcomes([outcome])
    assert outcomes.shown_k("p") == [1, 2]
    assert outcomes.value("p", "a", 0, "pass_at/2", "ada") == 0.4
    assert outcomes.value("p", "a", 0, "pass_at/2") is None  # bob has none


def test_tokens_are_compared_on_the_seeds_that_both_arms_have() -> None:
    pieces = [(0, "grpo", 100.0), (1, "grpo", 300.0), (1, "more", 450.0)]
    outcomes = Outcomes(
        [
            Outcome("p", arm, seed, {"ada": PolicyOutcome({"all": 0.5}, generated_tokens=tokens, extra_tokens=30.0)})
            for seed, arm, tokens in pieces
        ]
    )
    budget = compare(outcomes, "grpo").budget["p"]
    assert (budget["more"]["generated_tokens"], budget["more"]["extra_tokens"]) == (1.5, 0.1)  # of seed 1 alone
    assert budget["grpo"]["generated_tokens"] == 1.0


def test_a_group_whose_size_is_not_recorded_has_no_interval_where_all_seeds_are_equal() -> None:
    """One problem of a recorded size is the least width; of a guessed one, nothing is known."""
    for sizes, shown in (({"g": 16, "h": 16}, "1.000 [0.938, 1.000]"), ({}, "1.000 |")):
        policy = PolicyOutcome({"all": 0.5, "g": 1.0, "h": 0.0}, problems=32, sizes=sizes)
        text = markdown(compare(Outcomes([Outcome("p", "grpo", seed, {"ada": policy}) for seed in range(3)])))
        assert shown in text
        assert ("none where all seeds are equal" in text) == (not sizes)


def test_means_of_rewards_that_are_whole_numbers_of_problems_are_fractions() -> None:
    def bounded(*means: float) -> bool:
        pieces = [
            Outcome("p", "grpo", seed, {"ada": PolicyOutcome({"all": mean}, problems=4, mean_reward=True)})
            for seed, mean in enumerate(means)
        ]
        return not Outcomes(pieces).measure_rewards("p")

    assert bounded(0.25, 0.5, 1.0)
    assert not bounded(0.25, 0.6, 1.0)
    assert not bounded(0.25, 1.25, 1.0)
