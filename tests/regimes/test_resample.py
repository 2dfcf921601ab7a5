"""Dynamic sampling as pure functions, against rounds worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from mutualrl.regimes import get_regime
from mutualrl.regimes.resample import (
    Resample,
    SampledGroup,
    batch_scaled,
    differing,
    filled,
    further_rows,
    missing,
    order_of,
)
from mutualrl.regimes.run_problems import RunFacts, setting_problems

NAN = math.nan


def flags(*values: int) -> np.ndarray:
    return np.array(values, dtype=bool)


def test_group_is_live_if_two_scored_rewards_differ() -> None:
    rewards = [0, 0, 1, 1, 0, 1, NAN, 1, NAN, NAN, 0.5, 0.25]
    assert differing(rewards, 2).tolist() == [False, False, True, False, False, True]
    assert differing([NAN, 1, 0, NAN, NAN, 1], 3).tolist() == [True, False]


def test_places_of_equal_groups_are_filled_in_the_order_of_sampling() -> None:
    prompts = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["i", "b", "k", "l"]]
    live = [flags(0, 1, 0, 0), flags(0, 0, 1, 0), flags(0, 1, 0, 1)]
    # `b` is trained on already: its second group is left out
    groups = filled(prompts, live)
    assert groups == [SampledGroup(1, 2), SampledGroup(0, 1), SampledGroup(2, 3), SampledGroup(0, 3)]
    assert missing(groups, live) == 1
    assert missing(filled(prompts[:1], live[:1]), live[:1]) == 3


def test_surplus_groups_are_left_out_and_a_live_batch_stays_as_it_is() -> None:
    prompts, live = [["a", "b"], ["c", "d"]], [flags(1, 0), flags(1, 1)]
    assert filled(prompts, live) == [SampledGroup(0, 0), SampledGroup(1, 0)]
    assert filled(prompts, [flags(1, 1), flags(1, 1)]) == [SampledGroup(0, 0), SampledGroup(0, 1)]


def test_further_prompts_are_new_ones_then_dropped_ones_and_never_those_trained_on() -> None:
    ids = ["a", "b", "c", "d", "e"]
    sampled, trained = {"a", "b", "c"}, {"a"}
    order = [2, 0, 4, 1, 3]
    assert further_rows(order, ids.__getitem__, sampled, trained, 2) == [4, 3]
    assert further_rows(order, ids.__getitem__, sampled, trained, 3) == [4, 3, 2]
    assert further_rows(order, ids.__getitem__, sampled, trained, 6) == [4, 3, 2, 1, 4, 3]  # no others: once more
    assert further_rows(order, ids.__getitem__, set(ids), set(ids), 2) == []


def test_large_data_are_read_no_further_than_needed() -> None:
    read: list[int] = []

    def id_of(row: int) -> str:
        read.append(row)
        return str(row)

    assert len(further_rows(order_of(10_000, 0, 0, 1), id_of, {"5"}, set(), 8)) == 8
    assert len(read) <= 9


def test_order_depends_on_seed_round_and_attempt_alone() -> None:
    first = order_of(100, 1, 2, 3).tolist()
    assert order_of(100, 1, 2, 3).tolist() == first
    assert sorted(first) == list(range(100))
    for other in ((100, 2, 2, 3), (100, 1, 3, 3), (100, 1, 2, 4)):
        assert order_of(*other).tolist() != first


def test_batch_scaling_divides_by_the_deviation_of_the_batch_by_hand() -> None:
    # rewards 1, 0 | 3, 1: mean 1.25, squared deviations .0625 + 1.5625 + 3.0625 + .0625 = 4.75, over 3
    deviation = math.sqrt(4.75 / 3) + 1e-4
    expected = [0.5 / deviation, -0.5 / deviation, 1 / deviation, -1 / deviation]
    assert batch_scaled([1, 0, 3, 1], 2) == pytest.approx(expected)
    assert batch_scaled([1, NAN, 3, 1], 2).tolist()[:2] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("regime", "message"),
    [
        ("sgt", "regime 'sgt' reads rollouts on the same prompts"),
        ("guided", "regime 'guided' reads rollouts on the same prompts"),
        ("grpo-noise", "regime 'grpo-noise' plans the advantages of all groups"),
    ],
)
def test_regimes_that_cannot_are_refused_by_name(regime: str, message: str) -> None:
    rule = get_regime(regime)()
    problems = [problem for key, problem in setting_problems(rule, RunFacts(resample=True)) if key == "resample"]
    assert len(problems) == 1
    assert message in problems[0]
    assert "leave round.resample out" in problems[0]
    assert all(key != "resample" for key, _ in setting_problems(rule, RunFacts()))


def test_normalized_rewards_are_refused() -> None:
    facts = RunFacts(resample=True, trainer={"multi_objective_aggregation": "normalize_then_sum"})
    problems = dict(setting_problems(get_regime("grpo")(), facts))
    assert "expected 'sum_then_normalize'" in problems["resample"]
    assert "resample" not in dict(setting_problems(get_regime("grpo")(), RunFacts(resample=True)))


def test_attempts_are_between_1_and_100() -> None:
    assert Resample().max_attempts == 3
    for wrong in (0, 101, 1.5):
        with pytest.raises(ValidationError):
            Resample(max_attempts=wrong)
