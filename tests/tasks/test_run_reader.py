"""The one reader of agents' runs: every notation is the same value, and what is no run is none for a reason."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_notations import NOTATIONS, WITHOUT_REASONING, Row, Turn, expected, objects, openai

from mutualrl.tasks.files import data_files, file_rows
from mutualrl.tasks.run_reader import read_trajectory, trajectory_of
from mutualrl.trajectory import Conversation, Message, ToolCall

RUN = [
    Turn("I look.", "which page?", [("open", {"page": 3}), ("find", {"text": "a", "all": True})], ["no page", "12"]),
    Turn("", "", [("find", {"text": "b"})], ["[]"]),
    Turn("It is \\boxed{7}.", "", [], []),
]


def read(row: Row) -> Conversation:
    run = trajectory_of(row)
    assert run is not None
    return run


WORDS = st.text("ab 3{}[]\"'\\\n\u00e9\U0001f600", max_size=12).map(str.strip)
VALUES = st.recursive(
    st.booleans() | st.integers(-(10**9), 10**9) | WORDS,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text("xyz", min_size=1, max_size=3), each, max_size=2),
    max_leaves=4,
)
CALLS = st.tuples(
    st.sampled_from(["open", "find", "go.to"]),
    st.dictionaries(st.text("pq_", min_size=1, max_size=3), VALUES, max_size=3),
)


@st.composite
def runs(draw: Callable[..., Any]) -> list[Turn]:
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        calls = draw(st.lists(CALLS, min_size=1, max_size=3))
        results = draw(st.lists(WORDS, min_size=len(calls), max_size=len(calls)))
        turns.append(Turn(draw(WORDS), draw(WORDS), calls, results))
    return [*turns, Turn(draw(WORDS.filter(bool)), draw(WORDS), [], [])]


@pytest.mark.parametrize("notation", NOTATIONS, ids=lambda each: each.__name__)
@given(prompt=WORDS.filter(bool), turns=runs())
@settings(max_examples=60, deadline=None)
def test_every_notation_is_the_same_value(notation: Callable[..., Row], prompt: str, turns: list[Turn]) -> None:
    row = json.loads(json.dumps(notation(prompt, turns)))
    run = read(row)
    assert run.problem == ""
    assert run.messages == expected(prompt, turns, reasoning=notation not in WITHOUT_REASONING)
    assert run.is_run
    assert [call for call, _ in run.calls] == [ToolCall(*call) for turn in turns for call in turn.calls]
    assert [result and result.text for _, result in run.calls] == [text for turn in turns for text in turn.results]


def test_a_column_of_structs_gives_no_call_the_arguments_of_another_tool(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    pq.write_table(pa.Table.from_pylist([objects("q", RUN)]), path)
    ((_, row),) = file_rows(path)
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"page": 3, "text": None, "all": None}
    assert read(row).messages == expected("q", RUN)


@pytest.mark.parametrize(
    ("arguments", "schema", "found"),
    [
        ({"a": 1, "b": None}, None, {"a": 1}),
        ({"a": 1, "b": None}, {"a": {}, "b": {}}, {"a": 1, "b": None}),  # the tool requires b: its null is a value
        ('{"a": 1, "b": null}', None, {"a": 1, "b": None}),  # somebody wrote it
        ({"a": {"x": None, "y": [None]}}, None, {"a": {"y": [None]}}),
        ("", None, {}),
        (None, None, {}),
        ("null", None, {}),
        ('"{\\"a\\": 1}"', None, {"a": 1}),
    ],
)
def test_what_counts_as_an_argument(arguments: object, schema: dict[str, Any] | None, found: dict[str, Any]) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    tools = (
        [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": schema, "required": list(schema)}},
            }
        ]
        if schema
        else None
    )
    row = {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}], "tools": tools}
    assert read(row).after[0].tool_calls == (ToolCall("f", found),)


def chat(*messages: Mapping[str, Any]) -> Row:
    return {"messages": [{"role": "user", "content": "q"}, *messages]}


def say(text: str = "", *calls: tuple[str, str], **more: Any) -> Row:
    listed = [{"id": key, "function": {"name": name, "arguments": {}}} for name, key in calls]
    return {"role": "assistant", "content": text, "tool_calls": listed, **more}


def result(text: str, key: str | None = None, name: str | None = None) -> Row:
    return {"role": "tool", "content": text, "tool_call_id": key, "name": name}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (chat(result("3"), say("x")), "a result without a call before it"),
        (chat(say("x"), result("3"), say("y")), "a result without a call before it"),
        (chat(say("", ("f", "1")), result("3", "2"), say("y")), "a result without a call before it"),
        (chat(say("", ("f", "1")), result("3", None, "g"), say("y")), "a result without a call before it"),
        (chat(say("", ("f", "1")), result("3", "1"), result("4", "1"), say("y")), "a call with two results"),
        (chat(say("", ("f", "1")), say("y")), "a call without a result, followed by another turn"),
        (
            chat(say("", ("f", "1")), {"role": "user", "content": "go on"}, result("3", "1"), say("y")),
            "a call without a result, followed by another turn",
        ),
        (
            chat(say("", ("f", "1"), ("g", "2")), result("3", "2")),
            "a call without a result, followed by one with a result",
        ),
        (chat(say("", ("", "1")), result("3", "1"), say("y")), "a call without a name"),
        (chat(say("a"), say("a")), "a turn that stands twice"),
        (
            chat(say("a"), {"role": "system", "content": "b"}, say("c")),
            "a message of 'system' where no template has one",
        ),
        (
            chat(say("a"), {"role": "critic", "content": "b"}, say("c")),
            "a message of 'critic' where no template has one",
        ),
        (chat({**say("", ("f", "1")), "role": "user"}, say("c"), say("d")), "a call that is not the model's"),
        (chat(say("", ("f", "1")), result("3", "1"), say("")), "an empty turn"),
        (chat(say("<think>\n</think>"), {"role": "user", "content": "?"}, say("c")), "an empty turn"),
        (chat(say("", ("f", "1")), result("3", "1"), say('<tool_call>{"name": "g"')), "a call that is written as text"),
        (chat(say("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>")), "a call that is written as text"),
        (
            chat(say('<tool_call>{"name": "g", "arguments": {}}</tool_call>', ("f", "1")), result("3", "1")),
            "calls in the text that are not the message's",
        ),
        (
            chat(say("<think>a</think>b", ("f", "1"), reasoning_content="c"), result("3", "1")),
            "reasoning in the text that is not the turn's",
        ),
        (
            chat(
                say("", ("f", "1")), {**result("", "1"), "content": [{"type": "image_url", "image_url": {}}]}, say("y")
            ),
            "a part that is no text",
        ),
        (
            {**chat(say("", ("f", "1")), result("3", "1")), "tools": [{"name": "g"}]},
            "a call of a tool that it does not have",
        ),
        (
            chat({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{3"}}]}, result("3")),
            "a call whose arguments are no JSON object",
        ),
    ],
)
def test_what_is_no_run_says_why(row: Row, problem: str) -> None:
    assert read(row).problem == problem


@pytest.mark.parametrize(
    "row",
    [
        chat(say("", ("f", "1"))),  # its result was too long for the completion
        chat(say("", ("f", "1"), ("g", "2")), result("3", "1")),
        chat(say('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("f", "1")), result("3", "1")),
        chat(say("", ("f", "1")), result("<tool_response>\n3\n</tool_response>", "1")),
    ],
)
def test_what_a_run_may_be(row: Row) -> None:
    run = read(row)
    assert run.problem == ""
    assert run.after[0] == Message("assistant", "", tool_calls=run.after[0].tool_calls)
    assert run.calls[0][1] in (None, Message("tool", "3", name="f"))


FENCE = "`" * 3


def google(value: object) -> Row:
    return {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": value}}]}


@pytest.mark.parametrize(
    ("messages", "after"),
    [
        # Amazon's parts in a column of structs: the null of another kind of part is none
        (
            [
                say("", ("f", "1")),
                {
                    "role": "user",
                    "content": [{"toolResult": {"toolUseId": "1", "content": [{"text": "hello", "json": None}]}}],
                },
            ],
            ["f", "hello"],
        ),
        # an item of Responses has an id of its own beside the call's
        (
            [
                {"type": "function_call", "role": None, "id": "fc", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "role": None, "call_id": "c", "output": "3"},
            ],
            ["f", "3"],
        ),
        # Google's ids tell two calls of one tool apart
        (
            [
                {"role": "model", "parts": [{"functionCall": {"id": n, "name": "f", "args": {}}} for n in "12"]},
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"id": n, "name": "f", "response": {"output": n * 3, "error": None}}}
                        for n in "21"
                    ],
                },
            ],
            ["ff", "111", "222"],
        ),
        # a list as a result is JSON, not parts
        ([say("", ("f", "1")), google({"result": ["a", "b"]})], ["f", '["a", "b"]']),
        ([say("", ("f", "1")), google({"result": [{"text": "x", "n": 1}]})], ["f", '[{"text": "x", "n": 1}]']),
        ([say("", ("f", "1")), google({"output": []})], ["f", "[]"]),
        # LangChain has a call of Anthropic's in the content and in a field of its own
        (
            [
                {
                    "type": "ai",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
                    "tool_calls": [{"name": "f", "args": {}, "id": "1"}],
                },
                {"type": "tool", "data": {"content": "3", "tool_call_id": "1"}},
            ],
            ["f", "3"],
        ),
        # results as text: in one message of a tool, or in a message each
        (
            [
                say("", ("f", "1"), ("g", "2")),
                result("<tool_response>3</tool_response><tool_response>4</tool_response>"),
            ],
            ["fg", "3", "4"],
        ),
        (
            [
                say("", ("f", "1"), ("g", "2")),
                {"role": "user", "content": "<tool_response>3</tool_response>"},
                {"role": "user", "content": "<tool_response>4</tool_response>"},
            ],
            ["fg", "3", "4"],
        ),
        ([say('<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>'), result("3")], ["f", "3"]),
        # reasoning between calls that are made at once
        (
            [
                say("", ("f", "1")),
                {"type": "reasoning", "summary": []},
                {"type": "reasoning", "summary": []},
                say("", ("g", "2")),
                result("3", "1"),
                result("4", "2"),
            ],
            ["fg", "3", "4"],
        ),
    ],
)
def test_rows_as_vendors_write_them(messages: list[Row], after: list[str]) -> None:
    run = read(json.loads(json.dumps(chat(*messages))))
    assert run.problem == ""
    assert ["".join(call.name for call in m.tool_calls) or m.text for m in run.after] == after


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<think>maybe <tool_call>{"name": "f", "arguments": {}}</tool_call>?</think>7', ""),
        (f'Write\n{FENCE}\n<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>\n{FENCE}', ""),
        ("Mistral writes [TOOL_CALLS] [1, 2] so.", "a call that is written as text"),
    ],
)
def test_a_call_that_is_only_talked_about_is_none(text: str, problem: str) -> None:
    run = read(chat(say(text)))
    assert (run.problem, run.is_run, run.after[0].text) == (problem, False, text)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([say("", ("f", "1")), say("", ("f", "1"))], "a turn that stands twice"),
        (
            [say("x"), {"role": "user", "content": "?"}, {"type": "mcp_call", "id": "1"}, say("x")],
            "a part that is no text",
        ),
        (
            [say("x"), {"role": "user", "content": "?"}, {"role": "assistant", "content": "", "toolInvocations": [{}]}],
            "a part that is no text",
        ),
    ],
)
def test_what_a_reader_does_not_know_is_counted(messages: list[Row], problem: str) -> None:
    assert read(chat(*messages)).problem == problem


def test_a_parent_that_is_no_node_is_no_trace() -> None:
    message = {"role": "user", "content": "q"}
    run = read({"nodes": [{"parent": None, "message": message}, {"parent": 99, "message": say("a")}]})
    assert run.problem == "a node whose parent is no earlier one"
    floats = read({"nodes": [{"parent": None, "message": message}, {"parent": 0.0, "message": say("a")}]})
    assert len(floats.messages) == 2


def test_arguments_that_no_json_has_are_no_error() -> None:
    import datetime

    run = read(chat({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [datetime.date(2026, 1, 1)]}]}))
    assert run.problem == "a call whose arguments are no JSON object"


def test_a_turn_of_many_messages_is_joined_once() -> None:
    parts = [say(f"{number} " + "x" * 200) for number in range(20_000)]
    run = read(chat(*parts))
    assert len(run.after) == 1
    assert len(run.after[0].text) > 4_000_000


def is_well_formed(run: Conversation) -> bool:
    """Return whether a learner could be taught a run: written apart from the reader, over the roles as a text."""
    roles = "".join(
        f"a{len(m.tool_calls)}."
        if m.role == "assistant"
        else {"tool": "t", "user": "u", "system": "s"}.get(m.role, "x")
        for m in run.after
    )
    last = ""
    while match := re.match(r"a(\d+)\.(t*)u*", roles):
        calls, results = int(match[1]), len(match[2])
        roles = roles[match.end() :]
        if results > calls or (results < calls and (roles or match[0].endswith("u"))):
            return False
        last = match[0]
    names = [result.name == call.name for call, result in run.calls if result is not None]
    turns = [m for m in run.after if m.role == "assistant"]
    return (
        not roles
        and bool(last)
        and all(names)
        and all(m.text.strip() or m.reasoning.strip() or m.tool_calls for m in turns)
        and all(call.name and isinstance(call.arguments, Mapping) for m in turns for call in m.tool_calls)
        and not any(m.others for m in run.after)
        and not any("<tool_call>" in m.text for m in turns)
    )


JUNK = (
    None,
    "",
    3,
    [],
    {},
    [None],
    "x",
    {"type": "image_url"},
    [{"type": "image_url"}],
    "<tool_call>{",
    '{"name": "f"}',
)


def damaged(row: Row, chance: random.Random) -> Row:
    """Return a row with one to three damages: a message that is gone, stands twice or elsewhere, a field that is
    another."""
    row = copy.deepcopy(row)
    ((column, values),) = [(name, value) for name, value in row.items() if isinstance(value, list)]
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(values)) if values else 0
        kind = chance.choice(("drop", "twice", "move", "field", "nested", "role"))
        if not values or kind == "drop":
            del values[place : place + 1]
        elif kind == "twice":
            values.insert(place, copy.deepcopy(values[place]))
        elif kind == "move":
            values.insert(chance.randrange(len(values)), values.pop(place))
        elif kind == "field" and isinstance(values[place], dict):
            values[place][chance.choice(sorted(values[place]) or ["x"])] = copy.deepcopy(chance.choice(JUNK))
        elif kind == "role" and isinstance(values[place], dict):
            values[place]["role"] = chance.choice(("assistant", "tool", "user", "function", "system"))
        elif kind == "nested" and isinstance(values[place], dict):
            inner = [each for each in values[place].values() if isinstance(each, list | dict) and each]
            target = chance.choice(inner) if inner else {}
            if isinstance(target, list):
                target[0] = copy.deepcopy(chance.choice(JUNK))
            elif target:
                target[chance.choice(sorted(target))] = copy.deepcopy(chance.choice(JUNK))
    return {**row, column: values}


def test_ten_thousand_damaged_runs_teach_nothing_that_is_no_run() -> None:
    chance = random.Random(7)
    rows = [notation("q", RUN) for notation in NOTATIONS]
    rows = [row for row in rows if any(isinstance(value, list) for value in row.values())]
    outcomes = {"run": 0, "no run": 0, "no messages": 0}
    for _ in range(10_000):
        row = damaged(chance.choice(rows), chance)
        run = trajectory_of(row)
        if run is None:
            outcomes["no messages"] += 1
        elif run.problem or not run.is_run:
            outcomes["no run"] += 1
        else:
            outcomes["run"] += 1
            assert is_well_formed(run), row
    assert min(outcomes.values()) > 500, outcomes


class Counted(str):
    """Text that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return str(self) == other


class CountedInt(int):
    """Number that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return int(self) == other


@pytest.mark.parametrize("size", [1000, 4000])
def test_the_path_of_a_trace_takes_steps_by_its_length(size: int) -> None:
    CountedInt.compared = 0
    nodes = [
        {"parent": CountedInt(n - 1) if n else None, "message": {"role": "user", "content": "a"}} for n in range(size)
    ]
    run = read_trajectory(nodes)
    assert run is not None
    assert len(run.messages) == size
    assert CountedInt.compared < 20 * size


@pytest.mark.parametrize("size", [500, 2000])
def test_the_results_of_a_turn_take_steps_by_their_number(size: int) -> None:
    Counted.compared = 0
    calls = [{"id": Counted(n), "name": "f", "arguments": {"n": n}} for n in range(size)]
    results = [{"role": "tool", "tool_call_id": Counted(n), "content": str(n)} for n in reversed(range(size))]
    run = read_trajectory([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert run is not None
    assert [call.text for call in run.after[1:]] == [str(n) for n in range(size)]
    assert Counted.compared < 20 * size


@pytest.mark.parametrize(
    "text", ["<tool_call>{" * 50_000, "<tool_response>" * 50_000, "<think>" * 50_000, "[TOOL_CALLS] [" * 50_000]
)
def test_marks_without_an_end_are_read_once(text: str) -> None:
    """A pattern that looks for the end of each mark to the end of the text would take minutes."""
    run = read_trajectory([{"role": "assistant", "content": text}, {"role": "user", "content": text}])
    assert run is not None
    assert run.problem == ("a call that is written as text" if "call" in text.lower() else "")


def test_arguments_that_are_nested_deeply_are_no_run_or_read() -> None:
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"a": deep}
    row = json.loads(json.dumps(chat(say("", ("f", "1")), result("3", "1"))))
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = deep
    assert read(row).problem in ("", "a call whose arguments are no JSON object")


def test_runs_of_atif_are_found_in_a_directory_of_documents(tmp_path: Path) -> None:
    from run_notations import atif

    for number in range(2):
        path = tmp_path / "jobs" / f"run-{number}" / "agent" / "trajectory.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(atif("q", RUN), indent=2))
        (path.parent / "config.json").write_text('{"steps": 3}')
    files = data_files(tmp_path)
    assert [path.name for path in files] == ["trajectory.json"] * 2
    assert [read(row).messages for path in files for _, row in file_rows(path)] == [expected("q", RUN)] * 2


def test_a_trace_is_read_from_its_last_branch() -> None:
    messages = openai("q", RUN)["messages"]
    nodes = [{"parent": None, "message": messages[0]}]
    nodes += [{"parent": len(nodes) - 1 + n, "message": message} for n, message in enumerate(messages[1:])]
    nodes.insert(1, {"parent": 0, "message": {"role": "assistant", "content": "other"}})
    for node in nodes[2:]:
        node["parent"] = 0 if node["parent"] == 0 else int(str(node["parent"])) + 1
    run = read({"nodes": nodes})
    assert (run.messages, run.branches) == (expected("q", RUN), 1)
