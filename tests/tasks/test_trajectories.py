"""Runs of agents as records, and what a learner and people are shown of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.tasks.trajectories import (
    of_completion,
    own_words,
    plan,
    transcript,
    turns_within,
)
from mutualrl.trajectory import Message, ToolCall, Trajectory

SEARCH = ToolCall("search", {"query": "a", "limit": 3})
MESSAGES_OF_A_RUN = (
    Message("assistant", "I look.", "why", (SEARCH, ToolCall("open", {"page": "3"})), sampled=True),
    Message("tool", "nothing", name="search"),
    Message("tool", "x" * 50, name="open"),
    Message("assistant", "It is \\boxed{7}.", sampled=True),
)
RUN = Trajectory(MESSAGES_OF_A_RUN)


def test_a_stored_run_is_read_back() -> None:
    assert Trajectory.of_json(Trajectory.of_run(MESSAGES_OF_A_RUN).stored).messages == MESSAGES_OF_A_RUN
    stored = json.loads(RUN.stored)
    assert stored[0]["tool_calls"][0] == {
        "type": "function",
        "function": {"name": "search", "arguments": {"query": "a", "limit": 3}},
    }
    assert stored[1] == {"role": "tool", "content": "nothing", "name": "search"}


@pytest.mark.parametrize("text", ["", "{", "3", "[3]", '{"role": "user"}', "[" * 100_000])
def test_what_is_no_run_has_no_messages(text: str) -> None:
    assert Trajectory.of_json(text).messages == ()


def test_a_text_is_the_trajectory_of_one_message() -> None:
    text = Trajectory.of_text("  It is \\boxed{7}. ")
    assert (text.text, text.answer, text.stored, text.calls) == ("  It is \\boxed{7}. ", text.text, None, [])
    assert text == Trajectory.of_stored(text.text, None) != Trajectory.of_run(text.messages)
    assert Trajectory.of_stored(None, None) is None
    assert plan(text) == "" and transcript(text) == text.text


@given(st.lists(st.sampled_from(["1", "1.0", "true", '"1"', "[1, 2]", '{"b": 1, "a": null}']), max_size=3))
def test_runs_are_equal_if_they_are_stored_as_the_same(arguments: list[str]) -> None:
    """Arguments of other types are other runs, though Python's values are equal."""
    stored = [
        Trajectory.of_run([Message("assistant", "", tool_calls=(ToolCall("f", {"a": json.loads(each)}),))])
        for each in arguments
    ]
    assert len(set(stored)) == len(set(arguments))
    for run in stored:
        again = Trajectory.of_json(str(run.stored))
        assert again == run
        assert Trajectory(again.messages).stored == run.stored  # to the same bytes


GOOD = {"role": "assistant", "content": "it is 3"}
CALLED = {"function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "stored",
    [
        [{"content": "no role"}],
        [{"role": "assistant", "content": 3}],
        [{"role": "assistant", "content": [{"type": "text", "text": "parts"}]}],
        [GOOD, 3],
        [{**GOOD, "tool_calls": [{"name": "f", "arguments": {}}]}],
        [{**GOOD, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        [{**GOOD, "tool_calls": 3}],
    ],
)
def test_what_we_do_not_write_is_no_run(stored: list[object]) -> None:
    """A foreign shard of a bucket may have any JSON: a part of it must not be taken for the run."""
    assert Trajectory.of_json(json.dumps([GOOD])).text == "it is 3"
    assert Trajectory.of_json(json.dumps(stored)).messages == ()


def test_columns_of_a_shard() -> None:
    run = json.dumps([{**GOOD, "reasoning": "\n", "tool_calls": [CALLED]}])
    assert Trajectory.of_stored(None, run) is None  # not published
    read = Trajectory.of_stored("it is 3", run)
    assert read is not None and read.messages[0].reasoning == ""  # no template writes blank reasoning
    assert Trajectory.of_stored("it is 3", "") == Trajectory.of_json("")


@pytest.mark.parametrize("depth", [100, 900, 985, 990, 1100])
def test_arguments_nested_as_deeply_as_a_model_likes(depth: int) -> None:
    deep: object = 1
    for _ in range(depth):
        deep = [deep]
    run = Trajectory.of_run([Message("assistant", "so", tool_calls=(ToolCall("f", {"a": deep}),))])
    assert (run.text, [call.name for call in run.calls]) == ("so", ["f"])
    assert isinstance(run.calls[0].arguments, dict) or depth > 900  # what JSON can hold stays as it is
    assert isinstance(run.calls[0].arguments, str) or depth < 990
    assert run.chats[0]["tool_calls"][0]["function"]["arguments"] == run.calls[0].arguments  # type: ignore[index]
    assert Trajectory.of_json(str(run.stored)) == run


def test_a_reward_that_changes_its_messages_changes_no_run() -> None:
    run = Trajectory.of_run([Message("assistant", "", tool_calls=(ToolCall("f", {"a": 1}),))])
    run.chats[0]["tool_calls"][0]["function"]["arguments"].pop("a")  # type: ignore[index]
    assert run.calls == [ToolCall("f", {"a": 1})]


def test_the_beginning_of_a_run() -> None:
    assert RUN.first(None) is RUN
    assert RUN.first(1).messages == MESSAGES_OF_A_RUN[:1]
    beginning = RUN.beginning(1)
    assert beginning is not None and beginning.messages == MESSAGES_OF_A_RUN[:3]
    assert RUN.beginning(2) is None  # its last message has no result
    assert Trajectory(MESSAGES_OF_A_RUN[:1]).beginning(1) is None


def test_completion_of_trl_is_sampled_where_the_assistant_wrote() -> None:
    completion = [{"role": "assistant", "content": "a"}, {"role": "tool", "name": "t", "content": "b"}]
    assert [message.sampled for message in of_completion(completion)] == [True, False]


def test_what_is_shown_of_a_run() -> None:
    assert plan(RUN) == '1. search {"query": "a", "limit": 3}\n2. open {"page": "3"}'
    assert plan(RUN, answer=True).endswith("\nAnswer: It is \\boxed{7}.")
    assert transcript(RUN, lambda text: text[:9]).splitlines() == [
        "I look.",
        '-> search {"query": "a", "limit": 3}',
        '-> open {"page": "3"}',
        "[search] nothing",
        "[open] xxxxxxxxx",
        "It is \\boxed{7}.",
    ]
    assert RUN.text == "I look.\nIt is \\boxed{7}."
    assert RUN.answer == "It is \\boxed{7}."
    assert own_words(RUN) == "why\nI look.\nIt is ."


def test_a_call_without_a_result_is_a_call() -> None:
    cut = Trajectory(MESSAGES_OF_A_RUN[:1])  # TRL takes back a result that is too long
    assert cut.calls == [SEARCH, ToolCall("open", {"page": "3"})]
    assert plan(cut, answer=True).endswith("\nAnswer: I look.")


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    run = Trajectory(
        of_completion([{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{3"}]}])
    )
    assert run.calls == [ToolCall("f", "{3")]
    assert plan(run) == "1. f {3"


def test_a_lone_surrogate_is_stored_as_a_question_mark() -> None:
    (message,) = Trajectory.of_json(Trajectory.of_run([Message("tool", "a\ud800b")]).stored).messages
    assert message.text == "a?b"


TEXTS = st.text(st.characters(codec=None), max_size=400)
MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(["assistant", "tool", "user"]),
        TEXTS,
        tool_calls=st.lists(st.builds(ToolCall, TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=2)), max_size=2).map(
            tuple
        ),
        name=TEXTS,
    ),
    max_size=12,
)


@given(MESSAGES, st.integers(200, 3000))
def test_turns_for_people_have_bounded_bytes(messages: list[Message], most: int) -> None:
    turns = turns_within(Trajectory(tuple(messages)), most)
    data = json.dumps(turns, ensure_ascii=False).encode()  # no lone surrogate is left
    assert len(data) <= most + 100
    assert len(turns) <= len(messages)
    if len(json.dumps([m.text for m in messages]).encode()) < most // 3 and not any(
        m.tool_calls or m.name for m in messages
    ):
        assert "more characters]" not in data.decode() or "more characters]" in "".join(m.text for m in messages)
