"""Files of agents' runs: every layout gives the same run, in bounded memory, and a task without tools leaves it out."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_files import CALL, LAYOUTS, chat, messages, traces, write

from mutualrl.errors import DataError
from mutualrl.records import Prompt
from mutualrl.sources.layouts import reward_of
from mutualrl.sources.prepare import claimed_rewards
from mutualrl.sources.recorded import read_recorded
from mutualrl.sources.section import Columns
from mutualrl.tasks.run_reader import read_trajectory
from mutualrl.tasks.trajectories import plan, transcript
from mutualrl.trajectory import ToolCall

PROMPTS = [Prompt(f"p{number}", f"{number} plus 2?", str(number + 2), "plus") for number in range(3)]
TEXTS = {prompt.text: f"\\boxed{{{prompt.answer}}}" for prompt in PROMPTS}


def read(path: Path, *, turns: bool = True, reasoning: Any = "keep") -> Any:
    return read_recorded(str(path), Columns(), reasoning, PROMPTS, [], turns=turns)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_run(tmp_path: Path, layout: str) -> None:
    found = read(LAYOUTS[layout](tmp_path / "runs.jsonl", TEXTS))
    responses = dict(found.responses())
    assert list(responses) == ["p0", "p1", "p2"]
    for prompt in PROMPTS:
        run = responses[prompt.id].trajectory
        assert [message.role for message in run.messages][1:2] == ["tool"]
        assert run.messages[1].name == "calculate"
        assert run.messages[1].text == "3"
        assert run.calls == [ToolCall("calculate", CALL["arguments"])]
        assert type(run.calls[0].arguments["a"]) is int  # type: ignore[index]
        assert run.messages[0].reasoning == ("" if layout == "conversations" else "add")
        assert run.answer == run.text == TEXTS[prompt.text]
        assert plan(run) == '1. calculate {"operation": "plus", "a": 1, "b": 2}'
        assert plan(run, answer=True).endswith(f"\nAnswer: {TEXTS[prompt.text]}")
        assert transcript(run).splitlines()[-2:] == ["[calculate] 3", TEXTS[prompt.text]]
    assert found.counts["branches"] == (3 if layout == "traces" else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_task_without_tools_leaves_runs_out_and_counts_them(tmp_path: Path, layout: str) -> None:
    found = read(LAYOUTS[layout](tmp_path / "runs.jsonl", TEXTS), turns=False)
    assert not dict(found.responses())
    assert found.counts["several_turns"] + found.counts["calls"] == 3


def rewarded(path: Path, layout: str, solved: int) -> Path:
    """Return a file of runs of which the first `solved` have the reward 1, the others 0, as the layout writes it."""
    rows = [json.loads(line) for line in LAYOUTS[layout](path, TEXTS).read_text().splitlines()]
    for number, row in enumerate(rows):
        reward = float(number < solved)
        row.pop("reward", None)
        key = {"traces": "rewards", "atif": "final_metrics"}.get(layout, "reward")
        row[key] = {"traces": {"correct": {"score": reward}}, "atif": {"reward": reward}}.get(layout, reward)
    return write(path, rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_of_agents_say_who_solves_what(tmp_path: Path, cli_here: Any, layout: str) -> None:
    files = [rewarded(tmp_path / f"{name}.jsonl", layout, solved) for name, solved in (("one", 1), ("two", 3))]
    if layout == "atif":
        for file in files:
            file.write_text(file.read_text().replace('"model_name": "m"', f'"model_name": "{file.stem}"'))
    options = ("--rollouts", files[0], "--rollouts", files[1], "--json")
    result = cli_here("complementarity", *options)
    assert result.returncode == 0, result.stderr
    pairs = {row["learner"]: row for row in json.loads(result.stdout)["pairs"]}
    assert pairs["one"]["learner_success"] == pytest.approx(1 / 3)
    assert pairs["two"]["learner_success"] == 1
    assert pairs["one"]["rescue"] == 1  # of its failures


def test_reasoning_is_dropped_where_asked(tmp_path: Path) -> None:
    found = read(messages(tmp_path / "runs.jsonl", TEXTS), reasoning="drop")
    assert {message.reasoning for _, each in found.responses() for message in each.trajectory.messages} == {""}


def test_the_last_branch_is_taken(tmp_path: Path) -> None:
    found = read(traces(tmp_path / "runs.jsonl", TEXTS))
    assert "lost" not in str(dict(found.responses()))
    assert [m.sampled for m in next(each.trajectory for _, each in found.responses()).messages] == [
        True,
        False,
        True,
    ]


def test_a_cyclic_trace_ends() -> None:
    nodes = [{"parent": place ^ 1, "message": {"role": "user", "content": "a"}} for place in (0, 1)]
    assert read_trajectory(nodes) is not None


def test_runs_that_differ_only_in_their_calls_are_two(tmp_path: Path) -> None:
    prompt = PROMPTS[0].text
    other = json.loads(
        json.dumps(chat(prompt, "\\boxed{2}"))
        .replace('\\\\\\"a\\\\\\": 1', '\\\\\\"a\\\\\\": 5')
        .replace('\\"a\\": 1', '\\"a\\": 5')
    )
    found = read(write(tmp_path / "runs.jsonl", [{"messages": chat(prompt, "\\boxed{2}")}, {"messages": other}]))
    assert len(list(found.responses())) == 2
    assert found.counts["duplicates"] == 0


def test_a_lone_surrogate_in_a_run_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.jsonl", [{"messages": chat(PROMPTS[0].text, "it \ud800 is")}])
    with pytest.raises(DataError, match=r"runs\.jsonl.*a lone surrogate"):
        read(path)


#: reads a file that is far larger than the memory that reading it may add
READER = """
import resource, sys
from mutualrl.records import Prompt
from mutualrl.trajectory import ToolCall
from mutualrl.sources.layouts import reward_of
from mutualrl.sources.prepare import claimed_rewards
from mutualrl.sources.recorded import read_recorded
from mutualrl.sources.section import Columns

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = read_recorded(sys.argv[1], Columns(), "keep", [Prompt("p", "7 plus 2?", "9", "g")], [], turns=True)
assert found.counts["rows"] == 100_000, found.counts
assert len(list(found.responses())) == 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_hundred_thousand_runs_are_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    filler = "x" * 1000
    row = {"messages": chat("PROMPT", filler)}
    text = json.dumps(row) + "\n"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(text.replace("PROMPT", f"{number} plus 2?"))
    assert path.stat().st_size > 120 * 2**20
    done = subprocess.run([sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 40  # MiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


@pytest.mark.parametrize(
    ("values", "reward"),
    [
        ({}, None),
        ({"reward": 0.0}, 0.0),
        ({"score": 1}, 1.0),
        ({"rewards": {"correct": {"score": 0.5}}}, 0.5),
        ({"rewards": {"r": 0.25}}, 0.25),
        ({"rewards": {"a": 1.0, "b": 0.0}}, None),
        ({"final_metrics": {"reward": 0.0}}, 0.0),
        ({"final_metrics": {}}, None),
        *(({"reward": value}, math.nan) for value in (None, "1", math.nan, 10**400, [1])),
    ],
)
def test_reward_of_a_row_is_what_the_file_says(values: dict[str, Any], reward: float | None) -> None:
    found = reward_of(values)
    assert found == reward or (found is not None and reward is not None and math.isnan(found) and math.isnan(reward))


def test_a_failure_of_a_file_is_no_success_where_only_the_environment_judges(tmp_path: Path) -> None:
    """Of a run, and of an answer without a call; a reward that is no number is none."""
    failed = [{"role": "user", "content": PROMPTS[1].text}, {"role": "assistant", "content": "I give up"}]
    rows: list[dict[str, Any]] = [
        {"messages": chat(PROMPTS[0].text, "\\boxed{9}"), "reward": 0.0},
        {"messages": failed, "reward": 0.0},
        {"messages": chat(PROMPTS[2].text, "\\boxed{4}"), "reward": None},
    ]
    found = read(write(tmp_path / "runs.jsonl", rows))
    rewards = claimed_rewards(list(found.responses()))
    assert rewards[:2] == [0.0, 0.0]
    assert math.isnan(rewards[2])
    plain = read(write(tmp_path / "solutions.jsonl", [{"messages": rows[0]["messages"]}]))
    assert claimed_rewards(list(plain.responses())) == [1.0]  # a file of solutions


@pytest.mark.parametrize("key", ["source", "parent"])
def test_messages_with_keys_of_other_formats_are_messages(tmp_path: Path, key: str) -> None:
    values = {"source": ("wiki", "gpt4"), "parent": (None, "m1")}[key]
    messages = [{"role": "user", "content": PROMPTS[0].text}, {"role": "assistant", "content": "\\boxed{2}"}]
    rows = [{"messages": [{**message, key: value} for message, value in zip(messages, values, strict=True)]}]
    for turns in (True, False):
        found = read(write(tmp_path / "chat.jsonl", rows), turns=turns)
        assert [(key, each.trajectory.text) for key, each in found.responses()] == [("p0", "\\boxed{2}")]
        assert found.counts["branches"] == 0


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ({"tool_calls": 5}, "a call without a result"),
        ({"tool_calls": [{"tool_call_id": ["a"], "function_name": "f"}]}, "a call without a result"),
        ({"tool_calls": [5, None]}, "a call without a result"),
        ({"observation": {"results": [{"source_call_id": {"x": 1}, "content": "3"}, 7]}}, "an empty turn"),
        ({"observation": 3}, ""),
        ({"message": [{"type": "text", "text": "a"}]}, ""),
    ],
)
def test_odd_steps_are_read_or_left_out_for_their_problem(tmp_path: Path, odd: dict[str, Any], problem: str) -> None:
    steps = [{"source": "user", "message": PROMPTS[0].text}, {"source": "agent", "message": "", **odd}]
    steps.append({"source": "agent", "message": "\\boxed{2}"})
    found = read(write(tmp_path / "runs.jsonl", [{"schema_version": "ATIF-v1.6", "steps": steps}]))
    if problem:
        assert not list(found.responses())
        assert next(iter(found.malformed)).startswith(problem)
    else:
        ((prompt_id, response),) = found.responses()
        assert (prompt_id, response.trajectory.text.splitlines()[-1]) == ("p0", "\\boxed{2}")


def test_results_stand_in_the_order_of_their_calls_with_their_names() -> None:
    calls = [{"id": "1", "name": "A", "arguments": {}}, {"id": "2", "name": "B", "arguments": {}}]
    values = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "b"},
        {"role": "tool", "content": "a"},
    ]
    run = read_trajectory(values)
    assert run is not None
    assert [(message.name, message.text) for message in run.after[1:]] == [("A", "a"), ("B", "b")]
    assert [(call.name, result and result.text) for call, result in run.calls] == [("A", "a"), ("B", "b")]
    nobody = read_trajectory([*values, {"role": "tool", "content": "nobody asked"}])
    assert nobody is not None
    assert nobody.problem == "a result without a call before it"
