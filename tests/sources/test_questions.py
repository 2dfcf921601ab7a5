"""Which prompts a source is asked about, and its budget: by hand, and against orders of answers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.records import Prompt
from mutualrl.sources.questions import (
    Answer,
    Budget,
    PromptShare,
    most_tokens,
    prompts_to_ask,
    questions_on,
    used_tokens,
)

PROMPTS = {
    key: Prompt(key, f"What is {key}?", key, "all", columns={"who": "abcd"[place % 3]})
    for place, key in enumerate("pqrstu")
}


ANY = PromptShare("t")


def chosen(*wanted: str, share: PromptShare = ANY, confirmed: str = "", round_index: int = 0) -> list[str]:
    return prompts_to_ask(
        [set(each) for each in wanted], PROMPTS, share, set(confirmed), run_seed=0, round_index=round_index
    )


def test_each_prompt_that_any_learner_wants_is_asked_once() -> None:
    assert chosen("rp", "rs", "") == ["p", "r", "s"]
    assert chosen("rp", "rs", confirmed="r") == ["p", "s"]
    assert chosen() == []


def test_rows_name_the_source_that_may_be_asked() -> None:
    assert chosen("pqrstu", share=PromptShare("a", column="who")) == ["p", "s"]
    assert chosen("pqrstu", share=PromptShare("b", column="who")) == ["q", "t"]
    assert chosen("pqrstu", share=PromptShare("d", column="who")) == []


def test_weighted_sources_divide_the_prompts_in_proportion() -> None:
    weights = {"a": 3.0, "b": 1.0}
    counts: Counter[str] = Counter()
    for round_index in range(400):
        parts = {
            name: chosen("pqrstu", share=PromptShare(name, weights=weights), round_index=round_index)
            for name in weights
        }
        assert sorted(itertools.chain(*parts.values())) == list("pqrstu")  # each prompt once
        counts.update({name: len(part) for name, part in parts.items()})
    assert counts["a"] / sum(counts.values()) == pytest.approx(0.75, abs=0.03)  # 2,400 draws: sd .009


def test_every_question_has_a_seed_of_its_own() -> None:
    questions = questions_on(["p", "q"], 3, "t", run_seed=0, round_index=4)
    assert [(q.prompt_id, q.sample) for q in questions] == [("p", 0), ("p", 1), ("p", 2), ("q", 0), ("q", 1), ("q", 2)]
    assert len({q.seed for q in questions}) == 6
    assert questions == questions_on(["p", "q"], 3, "t", run_seed=0, round_index=4)
    assert {q.seed for q in questions}.isdisjoint(
        q.seed for q in questions_on(["p"], 3, "t", run_seed=0, round_index=5)
    )
    assert {q.seed for q in questions}.isdisjoint(
        q.seed for q in questions_on(["p"], 3, "u", run_seed=0, round_index=4)
    )


def test_tokens_are_the_servers_counts_or_the_most_that_there_can_be() -> None:
    assert used_tokens(Answer("four", True, 7, 2), "2 + 2") == (7, 2)
    assert used_tokens(Answer("four", True), "2 + 2") == (5 + 512, 4)
    assert used_tokens(Answer(failure="status 500"), "2 + 2") == (0, 0)
    assert used_tokens(Answer(failure="an empty text", prompt_tokens=7, completion_tokens=20), "2 + 2") == (7, 20)
    assert most_tokens("é", 10) == 2 + 512 + 10


def asked_by_formula(limit: int, used: list[int], concurrency: int) -> list[int]:
    """Return the questions whose predecessors, without those that may be in flight, used less than the limit."""
    return [place for place in range(len(used)) if sum(used[: max(0, place - concurrency + 1)]) < limit]


@given(st.integers(1, 300), st.lists(st.integers(0, 30), max_size=12), st.integers(1, 6))
def test_a_budget_counts_what_came_and_only_answers_in_flight_exceed_it(
    limit: int, used: list[int], concurrency: int
) -> None:
    budget = Budget(limit)
    asked: list[int] = []
    for place in range(len(used)):
        if not budget.allows(sum(used[number] for number in asked if number <= place - concurrency)):
            break
        asked.append(place)
    assert asked == asked_by_formula(limit, used, concurrency)
    assert sum(used[place] for place in asked) < limit + 30 * concurrency


def test_earlier_rounds_count_and_no_limit_allows_all() -> None:
    assert Budget(100, used=60).allows(39)
    assert not Budget(100, used=60).allows(40)
    assert Budget(None, used=10**9).allows(10**9)
