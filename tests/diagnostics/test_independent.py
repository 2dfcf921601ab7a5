"""Diagnostics compared with reimplementations of their definitions: plain loops over plain dictionaries."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.rollouts import ModelRollouts, to_arrays
from mutualrl.diagnostics.specs.complementarity import complementarity
from mutualrl.errors import DataError, UsageError

Rewards = dict[str, dict[str, list[float]]]

POLICIES = ("a", "b", "c")
rewards_of_pools = st.integers(2, 3).flatmap(
    lambda m: st.integers(3, 8).flatmap(
        lambda p: st.integers(1, 3).flatmap(
            lambda k: st.lists(
                st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=k, max_size=k), min_size=p, max_size=p),
                min_size=m,
                max_size=m,
            )
        )
    )
)


def make_rewards(rows: list[list[list[float]]]) -> Rewards:
    return {POLICIES[m]: {f"p{i}": group for i, group in enumerate(prompts)} for m, prompts in enumerate(rows)}


def make_rollouts(rewards: Rewards, order: int = 0) -> ModelRollouts:
    rows = [
        {"policy": policy, "round": 0, "prompt_id": prompt, "rollout": i, "reward": reward}
        for policy, prompts in rewards.items()
        for prompt, group in prompts.items()
        for i, reward in enumerate(group)
    ]
    random.Random(order).shuffle(rows)
    return to_arrays(pa.Table.from_pylist(rows), "test")


def rate(part: int, total: int) -> float:
    return part / total if total else math.nan


def equal_or_nan(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or one == pytest.approx(other)


@given(rewards_of_pools, st.integers(0, 9))
def test_overlap_and_rescues_equal_set_operations(rows: list[list[list[float]]], order: int) -> None:
    rewards = make_rewards(rows)
    result = complementarity(make_rollouts(rewards, order), Thresholds(), "first", [1], seed=0)
    prompts = set(next(iter(rewards.values())))
    solved = {policy: {p for p, group in by_prompt.items() if group[0] > 0.8} for policy, by_prompt in rewards.items()}
    rows_by_pair = {(row.learner, row.peer): row for row in result.pairs}
    assert set(rows_by_pair) == set(itertools.permutations(rewards, 2))
    for (learner, peer), row in rows_by_pair.items():
        one, other = solved[learner], solved[peer]
        assert equal_or_nan(row.learner_success, rate(len(one), len(prompts)))
        assert equal_or_nan(row.peer_success, rate(len(other), len(prompts)))
        assert equal_or_nan(row.jaccard, rate(len(one & other), len(one | other)))
        assert equal_or_nan(row.rescue, rate(len(other - one), len(prompts - one)))
    counts = [sum(p in successes for successes in solved.values()) for p in prompts]
    pool = result.pool
    assert equal_or_nan(pool.any, rate(sum(c > 0 for c in counts), len(prompts)))
    assert equal_or_nan(pool.all, rate(sum(c == len(rewards) for c in counts), len(prompts)))
    assert equal_or_nan(pool.exactly_one, rate(sum(c == 1 for c in counts), len(prompts)))


def gate_probability(rewards: Rewards, learner: str, prompt: str, k: int) -> Fraction:
    """Return the fraction of all choices of k rollouts per policy on which SGT's gate opens, by enumeration."""
    choices = {policy: list(itertools.combinations(by_prompt[prompt], k)) for policy, by_prompt in rewards.items()}
    opened = total = 0
    for drawn in itertools.product(*choices.values()):
        groups = dict(zip(choices, drawn, strict=True))
        fails = all(reward < 0.2 for reward in groups[learner])
        peer = any(reward > 0.8 for name, group in groups.items() if name != learner for reward in group)
        opened += fails and peer
        total += 1
    return Fraction(opened, total)


@given(rewards_of_pools, st.integers(1, 2))
def test_gate_rate_is_the_mean_over_all_choices_of_k_rollouts(rows: list[list[list[float]]], k: int) -> None:
    rewards = make_rewards(rows)
    assume(k <= len(rows[0][0]))
    result = complementarity(make_rollouts(rewards), Thresholds(), "first", [k], seed=0)
    for gate in result.gate:
        learner = gate.learner
        chances = [gate_probability(rewards, learner, prompt, k) for prompt in rewards[learner]]
        assert gate.at[0].rate == pytest.approx(float(sum(chances) / len(chances)))


@given(rewards_of_pools, st.integers(0, 99))
def test_row_order_changes_nothing(rows: list[list[list[float]]], order: int) -> None:
    one = complementarity(make_rollouts(make_rewards(rows), 0), Thresholds(), "any", [1], seed=0)
    other = complementarity(make_rollouts(make_rewards(rows), order), Thresholds(), "any", [1], seed=0)
    assert repr(one) == repr(other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda rows: [r for r in rows if r["policy"] == "a"], UsageError, "rollouts of one model"),
        (lambda rows: [*rows, rows[0]], DataError, r"policy 'a' has rollout 0 of prompt 'p0' twice"),
        (
            lambda rows: [r for r in rows if (r["policy"] == "a") == (r["prompt_id"] == "p0")],
            DataError,
            "no prompt was answered by all of 'a', 'b'",
        ),
    ],
)
def test_invalid_rollout_tables_are_rejected(change: Any, error: type[Exception], message: str) -> None:
    rows = [
        {"policy": policy, "round": 0, "prompt_id": f"p{p}", "rollout": i, "reward": 1.0}
        for policy in ("a", "b")
        for p in range(2)
        for i in range(2)
    ]
    assert to_arrays(pa.Table.from_pylist(rows), "test").rewards_M_P_G.shape == (2, 2, 2)
    with pytest.raises(error, match=message):
        to_arrays(pa.Table.from_pylist(change(rows)), "test")
