"""`dense`: a source's judgement of the learner's own tokens, at the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mutualrl.errors import RegimeError
from mutualrl.records import Rollout, Score
from mutualrl.regimes import Plan, Results, RoundView, check_plan, get_regime, whitened_plan
from mutualrl.regimes.dense import Dense
from mutualrl.regimes.run_problems import RunFacts, member_problems, setting_problems
from mutualrl.rollouts import Rollouts
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory

FROZEN = SourceTraits(every_prompt=True, logprobs=True)
END = 9


class Bytes:
    """One token per byte, the end token last."""

    def ends_of(self, ids: Any) -> Any:
        """Return the byte where each ends."""
        return np.arange(1, len(ids) + 1)


def own(prompt_id: str, index: int, reward: float, ids: tuple[int, ...], *, ended: bool = True) -> Rollout:
    return Rollout(prompt_id, index, reward, ended, length=len(ids), advantage=0.0, token_ids=np.array(ids))


def score(prompt_id: str, index: int, logprobs: list[float], policy: str = "ada") -> Score:
    """Return a reading with one token per byte and the end token."""
    ends = [*range(1, len(logprobs)), len(logprobs) - 1]
    return Score(policy, prompt_id, index, np.array(ends), np.array(logprobs))


def view(
    rollouts: list[Rollout], scores: dict[str, list[Score]], solved: dict[str, list[str]], **more: Any
) -> RoundView:
    """Return a round: the log-prob of each own token is -1."""
    peers = {
        name: Rollouts.of([Rollout(p, 0, 1.0, True, trajectory=Trajectory.of_text("x")) for p in prompts], name, 0)
        for name, prompts in solved.items()
    }
    passages = {
        (each.prompt_id, tuple(each.token_ids.tolist())): np.full(len(each.token_ids), -1.0)
        for each in rollouts
        if each.token_ids is not None
    }
    made = RoundView(
        round=0,
        learner="ada",
        run_seed=0,
        rollouts=Rollouts.of(rollouts, "ada", 0),
        peers=peers,
        transfer=Bytes(),  # type: ignore[arg-type]
        sources=dict.fromkeys(solved, FROZEN),
        scores=scores,
        results=Results(logprobs=passages),
    )
    return replace(made, **more)


DEAD = [
    own("p", 0, 0.0, (1, 2, END)),
    own("p", 1, 0.0, (3, END)),
    own("q", 0, 1.0, (1, END)),
    own("q", 1, 0.0, (2, END)),
]


def test_plan_by_hand() -> None:
    """(-3 + 1), (-1 + 1), (-9 + 1 clipped at 5), times .5; the second rollout (-.5 + 1), (-1 + 1)."""
    scores = {"t": [score("p", 0, [-3, -1, -9]), score("p", 1, [-0.5, -1]), score("q", 1, [-1, -1])]}
    plan = Dense(coef=0.5).plan(view(DEAD, scores, {"t": ["p", "q"]}))
    assert {row: values.tolist() for row, values in plan.token_advantages.items()} == {
        0: [-1.0, 0.0, -2.5],
        1: [0.25, 0.0],
    }
    assert plan.metrics == pytest.approx(
        {
            **{"dense/gate_rate": 0.5, "dense/rollouts": 2, "dense/unread": 0, "dense/graded": 0, "dense/tokens": 5},
            **{"dense/ratio": (-2 + 0 - 8 + 0.5 + 0) / 5, "dense/largest": 8, "dense/clipped": 0.2},
            **{"dense/uneven": 0, "dense/left_out": 0},
        }
    )
    assert plan.advantages is None
    assert not plan.rows


def test_nothing_is_judged_without_a_success_of_the_source() -> None:
    scores = {"t": [score("p", 0, [-3, -1, -9])]}
    closed = Dense().plan(view(DEAD, scores, {"t": ["q"]}))
    assert not closed.token_advantages
    assert closed.metrics["dense/gate_rate"] == closed.metrics["dense/unread"] == 0
    assert not Dense().requests(view(DEAD, scores, {"t": ["q"]})).logprobs
    others = {"t": [score("p", 0, [-3, -1, -9], policy="bob")]}  # of another learner
    assert Dense().plan(view(DEAD, others, {"t": ["p"]})).metrics["dense/unread"] == 2


def test_a_graded_dead_group_stays_grpos() -> None:
    graded = [own("p", 0, 0.1, (1, END)), own("p", 1, 0.0, (2, END))]
    plan = Dense().plan(view(graded, {"t": [score("p", 0, [-3, -3])]}, {"t": ["p"]}))
    assert not plan.token_advantages
    assert plan.metrics["dense/graded"] == 1


def test_rollouts_that_were_cut_off_or_read_otherwise_are_counted() -> None:
    cut = [own("p", 0, 0.0, (1, 2), ended=False), own("p", 1, 0.0, (3, 4, END))]
    scores = {"t": [score("p", 0, [-1, -1]), score("p", 1, [-1, -1])]}  # the second reads one byte, the ids spell two
    plan = Dense().plan(view(cut, scores, {"t": ["p"]}))
    assert not plan.token_advantages
    assert plan.metrics["dense/unread"] == 2


def test_one_source_is_drawn_per_prompt_by_the_seed() -> None:
    scores = {"t": [score("p", 0, [-3, -3, -3])], "u": [score("p", 0, [-2, -2, -2])]}
    drawn = set()
    for seed in range(20):
        plan = Dense(coef=1).plan(view(DEAD, scores, {"t": ["p"], "u": ["p"]}, run_seed=seed))
        drawn.add(tuple(plan.token_advantages[0].tolist()))
    assert drawn == {(-2.0, -2.0, -2.0), (-1.0, -1.0, -1.0)}


def test_without_a_coefficient_the_advantages_keep_their_shape() -> None:
    scores = {"t": [score("p", 0, [-3, -1, -9])]}
    plan = Dense(coef=0).plan(view(DEAD, scores, {"t": ["p"]}))
    assert not plan.token_advantages
    assert plan.metrics["dense/rollouts"] == 1


def test_what_a_plan_may_add_is_checked_and_whitening_keeps_it() -> None:
    round_view = view(DEAD, {}, {})
    made = Plan(token_advantages={0: np.array([1.0, 2, 3])})
    assert check_plan(made, round_view, "mine").token_advantages[0].dtype == np.float32
    assert whitened_plan(made, round_view).token_advantages is made.token_advantages
    for wrong in ({0: np.zeros(2)}, {7: np.zeros(3)}, {0: np.array([0, np.nan, 0])}):
        with pytest.raises(RegimeError, match="token_advantages of own rollout"):
            check_plan(Plan(token_advantages=wrong), round_view, "mine")


@pytest.mark.parametrize("name", ["xgrpo+dense", "dense+prp", "guided+dense"])
def test_rules_that_change_equal_groups_are_not_combined_with_it(name: str) -> None:
    with pytest.raises(RegimeError, match="whose rewards are all equal"):
        get_regime(name)


def test_texts_may_be_learnt_beside_it() -> None:
    both = get_regime("sgt+dense")
    assert both().needs().scores
    scores = {"t": [score("p", 0, [-3, -1, -9])]}
    part = view(DEAD, scores, {"t": ["p"]}, state={})
    assert both(dense={"coef": 1.0}).regimes[1].plan(part).token_advantages


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", 0.7),
        ("importance_sampling_level", "sequence"),
        ("off_policy_mask_threshold", 0.5),
        ("top_entropy_quantile", 0.2),
        ("loss_type", "vespo"),
    ],
)
def test_settings_under_which_an_advantage_per_token_is_something_else(setting: str, value: object) -> None:
    found = setting_problems(Dense(), RunFacts(trainer={setting: value}))
    assert [key for key, _ in found] == [f"trainer.{setting}"]
    assert not setting_problems(Dense(), RunFacts(trainer={"temperature": 1.0, "loss_type": "dapo"}))


def test_sources_that_cannot_score_late_rounds_and_tools_are_refused() -> None:
    facts = RunFacts(peers=0, sources={"book": SourceTraits()})
    assert any("frozen:MODEL" in problem for _, problem in member_problems(Dense(), facts))
    assert not member_problems(Dense(), RunFacts(peers=0, sources={"t": FROZEN}))
    assert any(key == "staleness" for key, _ in setting_problems(Dense(), RunFacts(staleness=2)))
    assert any(key == "turns" for key, _ in setting_problems(Dense(), RunFacts(turns=True)))
