"""What regimes ask of sources: the prompts on which a learner wants a text, and the sources that each can use."""

from __future__ import annotations

import math

import pytest

from mutualrl.records import Rollout
from mutualrl.regimes import get_regime
from mutualrl.rollouts import Rollouts
from mutualrl.traits import SourceTraits
from regime_views import Peer, plan, view

GATED = SourceTraits()
EVERY_PROMPT = SourceTraits(every_prompt=True)
FROZEN = SourceTraits(every_prompt=True, logprobs=True)

#: all zero, all below 0.2, one success, one of 0.5, not scored
GROUPS = {"o": (0.0, 0.0), "z": (0.0, 0.1), "p": (0.0, 1.0), "q": (0.5, 0.0), "n": (math.nan, math.nan)}
OWN = Peer([(prompt_id, reward) for prompt_id, rewards in GROUPS.items() for reward in rewards])


@pytest.mark.parametrize(
    ("regime", "settings", "expected"),
    [
        ("sgt", {}, ["o", "z"]),  # q: a rollout at 0.5 is no failure
        ("sgt", {"failure_below": 0.6}, ["o", "q", "z"]),
        ("sgt", {"gate": "any"}, ["o", "p", "q", "z"]),
        ("sgt", {"gate": "none"}, ["n", "o", "p", "q", "z"]),
        ("sgt", {"gate": "relative"}, ["n", "o", "p", "q", "z"]),
        ("chord", {}, ["n", "o", "p", "q", "z"]),
        ("hinted", {}, ["o", "z"]),
        ("guided", {}, ["o", "z"]),
        ("swarm", {}, ["o"]),  # its success is any reward above 0
    ],
)
def test_prompts_on_which_a_learner_wants_a_text(regime: str, settings: dict[str, object], expected: list[str]) -> None:
    rule = get_regime(regime)(**settings)
    assert rule.unsolved(OWN) == expected
    assert rule.needs().everywhere == (len(expected) == len(GROUPS))  # what a dry run says beforehand


def test_rollouts_with_a_prefix_do_not_hide_a_failure_from_guided() -> None:
    rows = [Rollout("p", 0, 1.0, True, prefix=2), Rollout("p", 1, 0.0, True, prefix=0)]
    own = Rollouts.of(rows, "ada")
    assert get_regime("guided")().unsolved(own) == ["p"]
    assert get_regime("sgt")().unsolved(own) == []


def test_a_combination_wants_what_those_parts_want_that_may_learn_from_a_selection() -> None:
    assert get_regime("xgrpo+sgt")().unsolved(OWN) == ["o", "z"]
    assert not get_regime("xgrpo+sgt")().needs().everywhere
    assert get_regime("xgrpo+sgt")(sgt={"gate": "none"}).needs().everywhere
    assert get_regime("swarm+sgt")(sgt={"gate": "any"}).unsolved(OWN) == ["o", "p", "q", "z"]


@pytest.mark.parametrize(
    ("regime", "usable"),
    [
        ("sgt", (GATED, EVERY_PROMPT, FROZEN)),
        ("guided", (GATED, EVERY_PROMPT, FROZEN)),
        ("hinted", (GATED, EVERY_PROMPT, FROZEN)),
        ("swarm", (GATED, EVERY_PROMPT, FROZEN)),
        ("xgrpo", (EVERY_PROMPT, FROZEN)),
        ("prp", (FROZEN,)),
        ("hacpo", (FROZEN,)),
        ("xgrpo+sgt", (GATED, EVERY_PROMPT, FROZEN)),
    ],
)
def test_sources_that_a_regime_can_use(regime: str, usable: tuple[SourceTraits, ...]) -> None:
    rule = get_regime(regime)()
    found = tuple(traits for traits in (GATED, EVERY_PROMPT, FROZEN) if rule.source_problem(traits) is None)
    assert found == usable


def test_a_part_that_a_selection_would_bias_does_not_see_it() -> None:
    """xgrpo's part of the plan is that without the source; sgt learns from it."""
    both = get_regime("xgrpo+sgt")
    own = [("p", 0.0), ("p", 0.0), ("q", 1.0), ("q", 0.0)]
    peer = Peer([("p", 0.0, "no"), ("p", 0.0, "no"), ("q", 1.0, "b"), ("q", 1.0, "c")])
    teacher = Peer([("p", 1.0, "yes")])
    alone = plan(view(own, {"bob": peer}), both())
    for traits, sees in ((GATED, False), (EVERY_PROMPT, True)):
        asked = plan(view(own, {"bob": peer, "teacher": teacher}, sources={"teacher": traits}), both())
        assert [row.trajectory.text for row in asked.rows] == ["yes"]
        assert (asked.advantages != alone.advantages) is sees
    assert not alone.rows
