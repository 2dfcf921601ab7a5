"""`complementarity --hints`: success with a peer's success in the prompt and without, and the choice of a rule."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from conftest import REPOSITORY, Cli
from mutualrl.diagnostics.advice import Advice, with_hints, with_texts
from mutualrl.diagnostics.hints import CAVEAT, HintRow
from mutualrl.diagnostics.revival import ANY, RevivalRow

SMALL = ("--prompts", "32", "--samples", "4", "--max-new-tokens", "40", "--engine", "transformers", "--hints", "--json")


def hints(cli: Cli, *arguments: str) -> dict[str, Any]:
    result = cli("complementarity", *arguments, *SMALL)
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


@pytest.mark.slow
def test_policies_that_can_use_a_hint_are_told_to_use_hinted(cli: Cli) -> None:
    result = hints(cli, "--pool", "tiny-hints")
    assert result["recommended"] == "hinted"
    assert "of its answers with a hint" in result["recommendation"]
    assert [row["learner"] for row in result["hints"]] == ["hal", "ivy"]
    gates = {row["learner"]: row["observed"] for row in result["gate"]}
    for row in result["hints"]:
        assert row["gated"] == round(gates[row["learner"]] * 32)
        assert row["samples"] == 4 * (row["gated"] - row["too_long"])
        assert row["difference"] == pytest.approx(row["success_with"] - row["success_without"])
        low, high = row["difference_ci"]
        assert low <= row["difference"] <= high
        assert row["learnable"] <= row["success_with"]
        assert row["rescues_per_round"] == pytest.approx(row["learnable"] * row["samples"])  # a round has 32 prompts
        assert row["tokens_per_round"] > 0
    assert max(row["difference"] for row in result["hints"]) > 0.4


@pytest.mark.slow
def test_policies_that_cannot_use_a_hint_keep_the_recommendation_with_the_reason(cli: Cli) -> None:
    result = hints(cli, "--pool", "tiny-countdown")
    assert result["recommended"] == "sgt"
    assert "Hints do not help here (success with one: fay 0.00, without" in result["recommendation"]
    assert result["caveat"]


@pytest.mark.release
@pytest.mark.slow
def test_hints_of_a_source_for_one_model(cli: Cli) -> None:
    arguments = ("--model", "tiny:ada", "--task", "arithmetic", "--source", "book=recorded:tiny:book")
    result = hints(cli, *arguments)
    (row,) = result["hints"]
    (revival,) = result["revival"]
    assert row["gated"] == revival["revived"] > 0
    table = cli("complementarity", *arguments, *SMALL[:-1])
    assert "| ada | " in table.stdout.split("A peer's success as a hint, where the gate opens")[1]


def test_hints_need_models_to_sample(cli: Cli) -> None:
    result = cli("complementarity", "--rollouts", "a.jsonl", "--hints")
    assert result.returncode == 2


def row(**changes: Any) -> HintRow:
    values: dict[str, Any] = {
        "learner": "a",
        "prompts": 100,
        "gated": 20,
        "samples": 80,
        "success_with": 0.5,
        "success_without": 0.1,
    }
    values |= {"difference": 0.4, "difference_ci": (0.2, 0.6), "copies": 0.0, "bare": 0.0, "learnable": 0.4}
    values |= {"rescues_per_round": 9.0, "tokens_per_round": 800.0, "too_long": 0}
    return HintRow(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, "hinted"),
        ({"difference_ci": (-0.1, 0.9)}, "sgt"),
        ({"learnable": 0.0, "copies": 1.0}, "sgt"),
        ({"gated": 0}, "sgt"),
    ],
)
def test_hinted_is_chosen_where_a_hint_helps_and_leaves_something_to_learn(
    changes: dict[str, Any], choice: str
) -> None:
    advice = Advice("sgt", "sgt: its gate would open", {"gate": "all"}, 0.1, "measured")
    changed = with_hints(advice, [row(**changes)])
    assert changed.recommended == choice
    assert changed.recommendation.endswith("sgt: its gate would open") is (choice == "hinted")
    assert (changed.settings, changed.extra_rows) == (({}, 0.0) if choice == "hinted" else ({"gate": "all"}, 0.1))
    none = Advice("none", "none")
    assert with_hints(none, [row()]) == none


def test_the_caveat_says_what_was_measured() -> None:
    stored = json.loads((REPOSITORY / "benchmarks" / "results" / "hints_seeds.json").read_text())["comparison"]
    verdicts = {claim["claim"]: claim["verdict"] for claim in stored["claims"]}
    for claim, words in {
        "own words end above the peer's words": "own words ended above the peer's words (sgt)",
        "own words end not more than .05 below GRPO": "not more than .05 below GRPO",
        "own words raise pass@64": "with more solved among 64 samples",
    }.items():
        assert verdicts[claim] == "held"
        assert words in CAVEAT
    assert stored["budget"]["tiny-hints"]["hinted"]["generated_tokens"] > 1
    assert "over seven seeds; they cost samples" in CAVEAT
    stored = json.loads((REPOSITORY / "benchmarks" / "results" / "rivals.json").read_text())["comparison"]
    other = stored["differences"]["tiny-hints"]["hinted"]["accuracy"]
    assert other["high"] < 0
    assert other["n"] == 3
    assert "Three seeds of longer runs ended below GRPO" in CAVEAT
    assert with_hints(Advice("sgt", "sgt"), [row()]).caveat == CAVEAT


def test_recorded_texts_turn_none_into_sgt() -> None:
    none = Advice("none", "none: SGT's gate would rarely open")
    dead = RevivalRow("ada", ANY, prompts=16, failed=7, revived=6, rate=0.375, rate_ci=(0.1, 0.6))
    advice = with_texts(none, [dead])
    assert advice.recommended == "sgt"
    assert "ada 6 of 7" in advice.recommendation
    assert "not decided" in advice.caveat
    assert with_texts(none, [replace(dead, revived=0, rate=0.0, rate_ci=(0.0, 0.0))]) == none
    assert with_texts(Advice("sgt", "sgt: peers"), [dead]).recommendation.startswith("sgt: peers. Recorded texts")
    named = with_texts(Advice("sgt", "sgt: peers"), [replace(dead, learner="Qwen3-0.6B")])
    assert "Qwen3-0.6B 6 of 7" in named.recommendation  # a name keeps its capitals
