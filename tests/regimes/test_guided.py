"""Guided rollouts: which rollouts begin with what, and what is remembered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mutualrl.regimes import GuideView
from mutualrl.regimes.guided import SPEC, GuidedSettings, guided_count, plan, prefix_length, prefixes
from regime_views import Peer, view

HINT = list(range(10, 20))


def guide(state: dict[str, Any] | None = None, **changes: Any) -> GuideView:
    ids = [prompt for prompt in ("p", "q") for _ in range(4)]
    known = {"hints": {"p": [0, HINT]}} if state is None else state
    return GuideView(
        **{
            **{"round": 1, "learner": "ada", "run_seed": 0, "prompt_ids": ids, "indices": [0, 1, 2, 3] * 2},
            **{"group": 4, "max_length": 20, "state": known},
            **changes,
        }
    )


def test_a_share_of_a_prompts_rollouts_begins_with_a_prefix_of_what_is_remembered() -> None:
    given = prefixes(guide(), GuidedSettings())
    assert [bool(prefix) for prefix in given] == [False, False, True, True, False, False, False, False]
    assert all(list(prefix) == HINT[: len(prefix)] and len(prefix) <= 5 for prefix in given)
    assert given == prefixes(guide(), GuidedSettings())
    lengths = {len(prefixes(guide(round=number), GuidedSettings())[3]) for number in range(1, 60)}
    assert lengths == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("group", "share", "count"), [(4, 0.5, 2), (4, 0.0, 0), (5, 0.5, 2), (4, 0.99, 3), (8, 0.25, 2)]
)
def test_never_all_of_a_group(group: int, share: float, count: int) -> None:
    assert guided_count(group, share) == count


def test_the_length_of_a_prefix_by_hand() -> None:
    assert [prefix_length(10, 0.5, draw) for draw in (0.0, 0.19, 0.2, 0.99)] == [1, 1, 2, 5]
    assert prefix_length(1, 0.5, 0.9) == 0  # no token would be left to sample


def test_a_prefix_as_long_as_the_learners_limit_is_not_given_and_old_hints_are_forgotten() -> None:
    assert not any(prefixes(guide(max_length=1), GuidedSettings()))
    assert not any(prefixes(guide(round=5), GuidedSettings(memory=4)))
    assert any(prefixes(guide(round=4), GuidedSettings(memory=4)))


def test_a_gated_prompt_is_remembered_until_the_learner_succeeds_by_itself() -> None:
    own = [("p", 0.0), ("p", 0.0), ("q", 1.0), ("q", 0.0)]
    peer = Peer([("p", 1.0, "yes"), ("q", 1.0, "yes")])
    made = plan(view(own, {"bob": peer}, round=3), GuidedSettings())
    assert made.state == {"hints": {"p": [3, list(b"yes")]}}
    assert made.advantages is None
    assert made.rows == ()
    solved = [("p", 1.0), ("p", 0.0)]
    after = plan(view(solved, {"bob": Peer([("p", 0.0, "no")])}, round=4, state=made.state), GuidedSettings())
    assert after.state == {"hints": {}}


def test_a_guided_success_neither_closes_the_gate_nor_counts_as_the_learners_own() -> None:
    seen = view([("p", 0.0), ("p", 1.0)], {"bob": Peer([("p", 1.0, "new")])}, round=4)
    guided = replace(seen.rollouts[1], prefix=2)
    seen = replace(seen, rollouts=[seen.rollouts[0], guided], state={"hints": {"p": [1, [7]]}})
    made = plan(seen, GuidedSettings())
    assert made.state == {"hints": {"p": [4, list(b"new")]}}
    assert made.metrics["guided/gate_rate"] == 1.0
    assert made.metrics["guided/guided_accuracy"] == 1.0
    assert made.metrics["guided/unguided_accuracy"] == 0.0
    assert made.metrics["guided/prefix_tokens"] == 2.0


def test_unscorable_rollouts_are_in_no_mean() -> None:
    made = plan(view([("p", math.nan), ("p", 1.0)], {"bob": Peer([("p", 1.0, "x")])}), GuidedSettings())
    assert made.metrics["guided/unguided_reward"] == 1.0
    assert "guided/guided_reward" not in made.metrics


def test_settings_that_would_begin_no_rollout_or_contradict_each_other_are_refused() -> None:
    ((key, problem),) = SPEC.check(GuidedSettings(share=0.2), {"num_generations": 4})
    assert (key, "regime.share 0.2 of it is below one rollout" in problem) == ("num_generations", True)
    assert not SPEC.check(GuidedSettings(share=0.25), {"num_generations": 4})
    with pytest.raises(ValueError, match="must not exceed success_above"):
        GuidedSettings(success_above=0.1)
