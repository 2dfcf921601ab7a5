"""Which prompts a source is asked about, and its budget: by hand, and against orders of answers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.records import Prompt
from mutualrl.sources.questions import Answer, Budget, Share, most_tokens, prompts_to_ask, questions_on, used_tokens

PROMPTS = {
    key: Prompt(key, f"What is {key}?", key, "all", columns={"who": "abcd"[place % 3]})
    for place, key in enumerate("pqrstu")
}


ANY = Share("t")


def chosen(*wanted: str, share: Share = ANY, confirmed: str = "", round_index: int = 0) -> list[str]:
    return prompts_to_ask(
        [set(each) for each in wanted], PROMPTS, share, set(confirmed), run_seed=0, round_index=round_index
    )


def test_each_prompt_that_any_learner_wants_is_asked_once() -> None:
    assert chosen("rp", "rs", "") == ["p", "r", "s"]
    assert chosen("rp", "rs", confirmed="r") == ["p", "s"]
    assert chosen() == []


def test_rows_name_the_source_that_may_be_asked() -> None:
    assert chosen("pqrstu", share=Share("a", column="who")) == ["p", "s"]
    assert chosen("pqrstu", share=Share("b", column="who")) == ["q", "t"]
    assert chosen("pqrstu", share=Share("d", column="who")) == []


def test_weighted_sources_divide_the_prompts_in_proportion() -> None:
    weights = {"a": 3.0, "b": 1.0}
    counts: Counter[str] = Counter()
    for round_index in range(400):
        parts = {
            name: chosen("pqrstu", share=Share(name, weights=weights), round_index=round_index) for name in weights
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


def asked_under(limit: int, most: int, used: list[int], order: list[int], concurrency: int) -> list[int]:
    """Return the questions that a budget allows if answers arrive in some order, as `Asking` asks."""
    budget, in_flight, asked = Budget(limit), [], []

    def first() -> None:
        done = min(in_flight, key=order.index)
        in_flight.remove(done)
        budget.settle(most, used[done])

    for question in range(len(used)):
        while len(in_flight) >= concurrency:
            first()
        while (allowed := budget.allows(most)) is None:
            first()
        if not allowed:
            break
        budget.reserve(most)
        in_flight.append(question)
        asked.append(question)
    return asked


@given(st.integers(1, 300), st.lists(st.integers(0, 30), max_size=12), st.permutations(range(12)), st.integers(1, 6))
def test_a_budget_does_not_depend_on_the_order_of_the_answers(
    limit: int, used: list[int], order: list[int], concurrency: int
) -> None:
    expected = asked_under(limit, 30, used, list(range(12)), 1)  # one after another
    assert asked_under(limit, 30, used, list(order), concurrency) == expected
    assert sum(used[question] for question in expected) <= limit
