"""Guided rollouts: which rollouts start with a prefix, and which hints are kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mutualrl.regimes import GuideView
from mutualrl.regimes.guided import Guided, guided_count, prefix_length
from mutualrl.rollouts import Rollouts
from regime_views import Peer, plan, view

HINT = list(range(10, 20))


def guide(state: dict[str, Any] | None = None, **changes: Any) -> GuideView:
    ids = [prompt for prompt in ("p", "q") for _ in range(4)]
    hints = {"hints": {"p": [0, HINT]}} if state is None else state
    return GuideView(
        **{
            **{"round": 1, "learner": "ada", "run_seed": 0, "prompt_ids": ids, "indices": [0, 1, 2, 3] * 2},
            **{"group": 4, "max_length": 20, "state": hints},
            **changes,
        }
    )


def test_fraction_of_rollouts_starts_with_a_prefix_of_the_stored_hint() -> None:
    assigned = Guided().prefixes(guide())
    assert [bool(prefix) for prefix in assigned] == [False, False, True, True, False, False, False, False]
    assert all(list(prefix) == HINT[: len(prefix)] and len(prefix) <= 5 for prefix in assigned)
    assert assigned == Guided().prefixes(guide())
    lengths = {len(Guided().prefixes(guide(round=number))[3]) for number in range(1, 60)}
    assert lengths == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("group", "share", "count"), [(4, 0.5, 2), (4, 0.0, 0), (5, 0.5, 2), (4, 0.99, 3), (8, 0.25, 2)]
)
def test_guided_count_is_below_the_group_size(group: int, share: float, count: int) -> None:
    assert guided_count(group, share) == count


def test_prefix_length_matches_hand_computed_values() -> None:
    assert [prefix_length(10, 0.5, draw) for draw in (0.0, 0.19, 0.2, 0.99)] == [1, 1, 2, 5]
    assert prefix_length(1, 0.5, 0.9) == 0  # would leave no token to sample


def test_prefixes_at_the_length_limit_and_expired_hints_are_not_used() -> None:
    assert not any(Guided().prefixes(guide(max_length=1)))
    assert not any(Guided(memory=4).prefixes(guide(round=5)))
    assert any(Guided(memory=4).prefixes(guide(round=4)))


def test_hint_is_kept_until_the_learner_succeeds_unguided() -> None:
    own = [("p", 0.0), ("p", 0.0), ("q", 1.0), ("q", 0.0)]
    peer = Peer([("p", 1.0, "yes"), ("q", 1.0, "yes")])
    result = plan(view(own, {"bob": peer}, round=3), Guided())
    assert result.state == {"hints": {"p": [3, list(b"yes")]}}
    assert result.advantages is None
    assert result.rows == ()
    solved = [("p", 1.0), ("p", 0.0)]
    after = plan(view(solved, {"bob": Peer([("p", 0.0, "no")])}, round=4, state=result.state), Guided())
    assert after.state == {"hints": {}}


def test_guided_success_neither_closes_the_gate_nor_counts_as_unguided() -> None:
    round_view = view([("p", 0.0), ("p", 1.0)], {"bob": Peer([("p", 1.0, "new")])}, round=4)
    guided = replace(round_view.rollouts[1], prefix=2)
    round_view = replace(
        round_view, rollouts=Rollouts.of([round_view.rollouts[0], guided]), state={"hints": {"p": [1, [7]]}}
    )
    result = plan(round_view, Guided())
    assert result.state == {"hints": {"p": [4, list(b"new")]}}
    assert result.metrics["guided/gate_rate"] == 1.0
    assert result.metrics["guided/guided_accuracy"] == 1.0
    assert result.metrics["guided/unguided_accuracy"] == 0.0
    assert result.metrics["guided/prefix_tokens"] == 2.0


def test_unscorable_rollouts_are_excluded_from_means() -> None:
    result = plan(view([("p", math.nan), ("p", 1.0)], {"bob": Peer([("p", 1.0, "x")])}), Guided())
    assert result.metrics["guided/unguided_reward"] == 1.0
    assert "guided/guided_reward" not in result.metrics


def test_ineffective_or_contradictory_settings_are_rejected() -> None:
    ((key, problem),) = Guided(share=0.2).problems({"num_generations": 4})
    assert (key, "regime.share 0.2 of it is below one rollout" in problem) == ("num_generations", True)
    assert not Guided(share=0.25).problems({"num_generations": 4})
    with pytest.raises(ValueError, match="must not exceed success_above"):
        Guided(success_above=0.1)
