"""Claims tested on outcomes: the first study's verdicts, corrections, untestable claims, invalid files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import sweep_results
from conftest import REPOSITORY
from mutualrl.errors import RecipeError
from mutualrl.study.claims import ClaimFile, evaluate_claims, read_claims, verdict_counts
from mutualrl.study.comparison import compare
from mutualrl.study.outcomes import Outcome, Outcomes, PolicyOutcome

STUDY = REPOSITORY / "benchmarks" / "results" / "study.json"
#: the first study's result for each claim, computed by separate code
EXPECTED = Path(__file__).with_name("first_study_claims.json")
VERDICTS = {"held": "held", "not held": "refuted", "not decided": "undecided"}


def test_intervals_and_verdicts_of_the_first_study_are_reproduced() -> None:
    if not STUDY.is_file():
        pytest.skip("not in a source tree")
    outcomes, expected = sweep_results.outcomes_of(json.loads(STUDY.read_text())), json.loads(EXPECTED.read_text())
    file = read_claims(REPOSITORY / "benchmarks" / "sweeps" / "study-claims.yaml").file
    lines = {(line.claim.text, line.pool): line for line in evaluate_claims(outcomes, file)}
    assert len(expected) == len(lines) == 67
    for claim in expected:
        pool = "tiny" if claim["pool"] == "both" else claim["pool"]
        line = lines[claim["claim"], pool]
        assert line.verdict == VERDICTS[claim["verdict"]], claim
        for part, (name, estimate) in zip(claim["measured"].split("; "), line.estimates.items(), strict=True):
            numbers = [float(number) for number in re.findall(r"[+-][0-9.]+", part.removeprefix(f"{name} "))]
            width = numbers[2] - numbers[1]  # the first study rounded Student's quantiles to three digits
            assert [estimate.mean, estimate.low, estimate.high] == pytest.approx(numbers, abs=0.001 + width / 5000), (
                part
            )


def outcomes_of(values: dict[str, list[float]], pool: str = "p", problems: int | None = None) -> Outcomes:
    """Return outcomes of arms of one policy, by seed."""
    return Outcomes(
        [
            Outcome(pool, arm, seed, {"ada": PolicyOutcome(after={"all": value}, problems=problems)})
            for arm, by_seed in values.items()
            for seed, value in enumerate(by_seed)
        ]
    )


def one_claim(**changes: Any) -> ClaimFile:
    keys = {name: changes.pop(name) for name in ("seeds", "correction", "alpha", "problems") if name in changes}
    return ClaimFile.model_validate({"claims": [{"text": "c", "one": "a", "other": "b", **changes}], **keys})


FOUR = {"a": [0.50, 0.61, 0.55, 0.58], "b": [0.40, 0.50, 0.46, 0.46]}  # differences .10 .11 .09 .12


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "held"),
        ({"says": "below"}, "refuted"),
        ({"margin": 0.08}, "held"),
        ({"margin": 0.105}, "undecided"),
        ({"margin": 0.15}, "refuted"),
        ({"says": "within", "margin": 0.2}, "held"),
        ({"says": "within", "margin": 0.05}, "refuted"),
        ({"says": "within", "margin": 0.11}, "undecided"),
        ({"says": "below", "margin": {"share": 0.5, "of": "b"}}, "held"),  # less than half of b's above b
        ({"says": "above", "margin": {"share": -0.1, "of": "b"}}, "held"),
        ({"says": "above", "margin": {"share": 0.5, "of": "b"}}, "refuted"),  # not half of b's above b
        ({"problems": 9}, "undecided"),  # a resolution of 1 / 9 decides nothing
    ],
)
def test_verdict_follows_from_the_interval_and_the_margin(change: dict[str, Any], verdict: str) -> None:
    (line,) = evaluate_claims(outcomes_of(FOUR), one_claim(**change))
    assert line.verdict == verdict
    assert line.seeds == 4


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        ({}, {"margin": -0.03}),
        ({"margin": 0.02}, {"margin": 0.01}),
        ({"who": "each"}, {}),
        ({"says": "within", "margin": 0.2}, {"says": "within", "margin": 0.3}),
        ({"says": "within", "margin": 0.2}, {"says": "below", "margin": 0.2}),
        ({"margin": {"share": 0.1, "of": "b"}}, {"margin": {"share": 0.05, "of": "b"}}),
    ],
)
def test_implied_claim_is_marked_and_counted_once(stronger: dict[str, Any], weaker: dict[str, Any]) -> None:
    claims = [
        {"text": "weaker", "one": "a", "other": "b", **weaker},
        {"text": "stronger", "one": "a", "other": "b", **stronger},
    ]
    results = evaluate_claims(outcomes_of(FOUR), ClaimFile.model_validate({"claims": claims}))
    assert [(result.verdict, result.implied_by) for result in results] == [("held", "stronger"), ("held", "")]
    assert verdict_counts(results) == {"held": 1, "refuted": 0, "undecided": 0, "implied": 1}
    assert results[0].to_json()["implied_by"] == "stronger"


def test_refuted_claim_implies_that_stronger_ones_are_refuted() -> None:
    claims = [
        {"text": "above", "one": "b", "other": "a"},
        {"text": "at most .03 below", "one": "b", "other": "a", "margin": -0.03},
        {"text": "other measure", "one": "b", "other": "a", "measure": "accuracy/all"},
        {"text": "above, again", "one": "b", "other": "a"},
    ]
    results = evaluate_claims(outcomes_of(FOUR), ClaimFile.model_validate({"claims": claims}))
    assert [result.verdict for result in results] == ["refuted"] * 4
    assert [result.implied_by for result in results] == ["at most .03 below", "", "", "above"]


def test_holm_correction_over_the_family_can_undo_a_single_verdict() -> None:
    outcomes = outcomes_of({"a": [0.50, 0.60, 0.60, 0.60], "b": [0.40, 0.50, 0.54, 0.58]})
    claims = [{"text": str(n), "one": "a", "other": "b", "margin": n / 1000} for n in range(6)]
    alone = evaluate_claims(outcomes, ClaimFile.model_validate({"claims": claims, "correction": "none"}))
    family = evaluate_claims(outcomes, ClaimFile.model_validate({"claims": claims}))
    assert alone[0].verdict == "held"
    assert family[0].verdict == "undecided"
    assert family[0].p == pytest.approx(6 * alone[0].p)


def test_claim_about_each_policy_holds_only_if_it_holds_for_each() -> None:
    policies = [{"ada": 0.5 + d, "bob": 0.5 + e} for d, e in ((0.1, 0.0), (0.11, 0.01), (0.12, -0.01))]
    outcomes = [
        Outcome("p", "a", s, {n: PolicyOutcome({"all": v}) for n, v in by.items()}) for s, by in enumerate(policies)
    ]
    outcomes += [Outcome("p", "b", s, {n: PolicyOutcome({"all": 0.5}) for n in ("ada", "bob")}) for s in range(3)]
    (line,) = evaluate_claims(Outcomes(outcomes), one_claim(who="each"))
    assert line.verdict == "undecided"
    assert set(line.estimates) == {"ada", "bob"}
    (ada,) = evaluate_claims(Outcomes(outcomes), one_claim(who="ada"))
    assert ada.verdict == "held"
    (cyd,) = evaluate_claims(Outcomes(outcomes), one_claim(who="cyd"))
    assert (cyd.verdict, cyd.why) == ("undecided", "who: found cyd, expected one of ada, bob")
    (weakest,) = evaluate_claims(Outcomes(outcomes), one_claim(who="weakest"))
    assert weakest.why == "b has no accuracy before training"


@pytest.mark.parametrize(
    ("values", "change", "why"),
    [
        ({"a": [0.5, 0.6], "b": [0.4, 0.5]}, {}, "2 seeds, at least 3 are needed"),
        ({"a": [0.5] * 3}, {"pools": ["p"]}, "p: no run of b"),
        ({"a": [0.5] * 3}, {}, "no pool has a and b"),
        (FOUR, {"measure": "entropy"}, "not every run has entropy"),
        (FOUR, {"measure": "steps_to/c"}, "p: no run of c"),
        (FOUR, {"margin": {"share": 0.5, "of": "c"}}, "p: no run of c"),
    ],
)
def test_untestable_claim_is_undecided_with_a_reason(
    values: dict[str, list[float]], change: dict[str, Any], why: str
) -> None:
    (line,) = evaluate_claims(outcomes_of(values), one_claim(**change))
    assert (line.verdict, line.why) == ("undecided", why)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: []", "at least 1 item"),
        ("claims: [{text: c, one: a, measure: luck}]", "unknown measure, expected one of accuracy"),
        ("claims: [{text: c, one: a, measure: steps_to}]", "expected steps_to/ARM"),
        ("claims: [{text: c, one: a, measure: accuracy_at_tokens}]", "expected steps_to/ARM, accuracy_at_tokens/ARM"),
        ("claims: [{text: c, one: a, measure: kl/ada}]", "another measure without a slash"),
        ("claims: [{text: c, one: a, says: within}]", "within needs a margin above 0"),
        ("claims: [{text: c, one: a, say: above}]", "say: Extra inputs are not permitted"),
        ("claims: [{text: c, one: a, says: better}]", "Input should be 'above', 'below' or 'within'"),
        ("claims: [{text: c, one: a}]\nseeds: 1", "greater than or equal to 3"),
    ],
)
def test_invalid_claims_file_is_rejected_by_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "claims.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_claims(tmp_path / "claims.yaml")


def test_share_margin_is_computed_per_seed_and_from_the_magnitude() -> None:
    # exactly a quarter below in every seed, at any level: neither above nor below that margin
    levels = [0.3, 0.6, 0.45, 0.7, 0.52]
    outcomes = outcomes_of({"a": [0.75 * level for level in levels], "b": levels})
    (line,) = evaluate_claims(outcomes, one_claim(margin={"share": -0.25, "of": "b"}))
    assert line.verdict == "undecided"
    gates = [{"a": -0.30, "b": -0.30}, {"a": -0.31, "b": -0.31}, {"a": -0.29, "b": -0.29}]
    falling = Outcomes(
        [
            Outcome("p", arm, seed, {"ada": PolicyOutcome({"all": 0.5}, gate=[0.5, 0.5 + change])})
            for seed, by_arm in enumerate(gates)
            for arm, change in by_arm.items()
        ]
    )
    claim = one_claim(measure="gate_change", says="within", margin={"share": 0.25, "of": "b"})
    assert evaluate_claims(falling, claim)[0].verdict == "held"


def test_mean_rewards_may_leave_0_to_1_where_what_is_retained_and_pass_at_k_do_not() -> None:
    for mean_reward in (False, True):
        values = [(1.0, 1.0), (1.0, 1.0), (0.5, 0.8)]  # accuracy, retained and pass@8
        outcomes = [
            Outcome(
                "p", "a", s, {"ada": PolicyOutcome({"all": a}, retained=r, pass_at={"8": r}, mean_reward=mean_reward)}
            )
            for s, (a, r) in enumerate(values)
        ]
        compared = compare(Outcomes(outcomes), "a", None, [])
        (accuracy,) = {each.high for each in compared.final["p"]["a"].values()}
        assert (accuracy > 1) is mean_reward
        assert {name: each.high for name, each in compared.beside["p"]["a"].items()} == {"pass@8": 1.0, "retained": 1.0}


def test_no_interval_is_narrower_than_one_problem_or_one_validation() -> None:
    outcomes = []
    for seed in range(3):
        for arm, right, first in (("a", 1.0, 10), ("b", 0.5, 20)):
            curve = [(0, 0.0), (10, 0.5 if first == 10 else 0.4), (20, 0.5)]
            policy = PolicyOutcome({"all": 0.5, "rare": right}, problems=512, curve=curve)
            outcomes.append(Outcome("p", arm, seed, {"ada": policy}))
    all_outcomes = Outcomes(outcomes)
    assert all_outcomes.resolution("p", "accuracy") == 1 / 512
    assert all_outcomes.resolution("p", "accuracy/rare") == 1 / 2
    assert all_outcomes.resolution("p", "steps_to/b") == 10
    assert all_outcomes.resolution("p", "kl") == 0
    assert all_outcomes.resolution("p", "accuracy", problems=10**6) == 1 / 512  # the value in the runs wins
    (group,) = evaluate_claims(all_outcomes, one_claim(measure="accuracy/rare"))
    (earlier,) = evaluate_claims(all_outcomes, one_claim(measure="steps_to/b", says="below"))
    assert {group.verdict, earlier.verdict} == {"undecided"}


def test_run_that_never_reaches_the_target_counts_with_its_last_step() -> None:
    outcomes = outcomes_of({"a": [0.1] * 3, "b": [0.9] * 3})
    late = {
        key: Outcome(
            o.pool, o.arm, o.seed, {"ada": PolicyOutcome(o.policies["ada"].after, curve=[(0, 0.1), (40, 0.1)])}
        )
        for key, o in outcomes.by.items()
    }
    assert Outcomes(list(late.values())).value("p", "a", 0, "steps_to/b") == 40


def test_accuracy_at_the_tokens_of_another_arm_is_read_from_the_curve() -> None:
    curve = [(0, 0.1), (4, 0.3), (8, 0.5), (12, 0.9)]
    outcomes = []
    for arm, sampled in (("grpo", (0.0, 50.0, 100.0, 150.0)), ("resample", (0.0, 75.0, 150.0, 225.0))):
        policy = PolicyOutcome({"all": 0.9}, problems=10, curve=curve, sampled=sampled, generated_tokens=sampled[-1])
        outcomes.append(Outcome("p", arm, 0, {"ada": policy}))
    both = Outcomes(outcomes)
    assert both.value("p", "resample", 0, "accuracy_at_tokens/grpo") == 0.5  # 150 tokens at step 8
    assert both.value("p", "grpo", 0, "accuracy_at_tokens/grpo") == 0.9
    assert both.value("p", "grpo", 0, "accuracy_at_tokens/resample") == 0.9  # it never sampled as many
    assert both.value("p", "grpo", 0, "accuracy_at_tokens/other") is None
    assert both.resolution("p", "accuracy_at_tokens/grpo") == 0.1
    both_kinds = PolicyOutcome(
        {"all": 0.9}, curve=curve, sampled=[0.0, 50.0, 100.0, 150.0], learnt=[0.0, 30.0, 60.0, 90.0]
    )
    mixed = Outcomes([both.by["p", "grpo", 0], Outcome("p", "sgt", 0, {"ada": both_kinds})])
    assert mixed.value("p", "sgt", 0, "accuracy_at_tokens/grpo") == 0.3  # 100 + 60 tokens at step 8 are over 150
    without = Outcomes([Outcome("p", "grpo", 0, {"ada": PolicyOutcome({"all": 0.9}, curve=curve)})])
    assert without.value("p", "grpo", 0, "accuracy_at_tokens/grpo") is None


def test_runs_are_found_by_the_short_name_of_their_pool() -> None:
    outcomes = outcomes_of(FOUR, pool="arithmetic, pool tiny")
    (line,) = evaluate_claims(outcomes, one_claim(pools=["tiny"]))
    assert (line.verdict, line.pool) == ("held", "arithmetic, pool tiny")
    (absent,) = evaluate_claims(outcomes, one_claim(pools=["near"]))
    assert absent.why == "near: no run of a, b"
