"""Columns of users' rows: one table finds and checks them, whatever the file's format."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mutualrl.diagnostics.rollout_reader import read_rollouts
from mutualrl.errors import DataError
from mutualrl.tasks.columns import texts_of, truth_of


def read_both(tmp_path: Path, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rollouts that JSON Lines and Parquet with the same rows are read as."""
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    tables = [read_rollouts([tmp_path / name]) for name in ("r.jsonl", "r.parquet")]
    return [table.drop_columns(["file"]).to_pylist() for table in tables]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt_id": "p", "reward": 1.0}, {"prompt_id": "p", "reward": 1.0}),
        ({"id": 7, "reward": True}, {"prompt_id": "7", "reward": 1.0}),
        ({"prompt": " two  words ", "reward": 0}, {"prompt_id": "two words", "x_text": " two  words "}),
        ({"id": 1.0, "reward": 0, "ended": 1}, {"prompt_id": "1", "ended": True}),
        ({"id": "p", "reward": 0, "round": 2.0, "rollout": 1.0}, {"round": 2, "rollout": 1}),
        ({"id": "p", "reward": 0, "round": "3"}, {"round": 3}),
        ({"id": "p", "reward": 0, "token_ids": [1, 2], "logprobs": [-0.5, 0.0]}, {"token_ids": [1, 2]}),
        (
            {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "reward": 0},
            {"prompt_id": "S U", "x_text": "U"},
        ),
        ({"id": "p", "reward": 0, "completion": [{"role": "assistant", "content": "A"}]}, {"y_text": "A"}),
        ({"id": "p", "reward": 0, "completion": [3]}, {"prompt_id": "p"}),
    ],
)
def test_a_row_is_read_alike_from_lines_and_parquet(
    tmp_path: Path, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    lines, parquet = read_both(tmp_path, [row])
    assert lines == parquet
    assert lines[0] | expected == lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": "1"}, "row 1, field 'reward': found '1', expected a number"),
        ({"round": -1}, "row 1, field 'round': found -1, expected a non-negative integer"),
        ({"round": 1.5}, "field 'round': found 1.5, expected a non-negative integer"),
        ({"tokens": 2**62 * 1.0 * 4}, "field 'tokens': found 1.8446744073709552e+19, expected a non-negative integer"),
        ({"ended": 2}, "field 'ended': found 2, expected true or false"),
        ({"id": None}, "row 1: field 'id' is null, expected a string or an integer"),
        ({"id": 1.5}, "field 'id': found 1.5, expected a string or an integer"),
        ({"policy": None}, "row 1: field 'policy' is null, expected a string"),
        ({"policy": 3}, "field 'policy': found 3, expected a string"),
    ],
)
def test_a_value_of_another_kind_is_refused_alike(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = [{"id": "p", "reward": 0.0, **change}]
    (tmp_path / "r.jsonl").write_text(json.dumps(rows[0]) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    for name in ("r.jsonl", "r.parquet"):
        with pytest.raises(DataError) as refused:
            read_rollouts([tmp_path / name])
        assert message in str(refused.value)


def test_numbers_that_only_parquet_has_are_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["p"], "reward": [Decimal("0.50")]}), tmp_path / "r.parquet")
    assert read_rollouts([tmp_path / "r.parquet"])["reward"].to_pylist() == [0.5]
    pq.write_table(pa.table({"id": ["p"], "reward": [datetime.date(2026, 1, 2)]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="expected a number"):
        read_rollouts([tmp_path / "d.parquet"])


def test_a_text_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"id": "p", "reward": 1, "completion": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"row 1, field 'completion': found .*, expected Unicode text"):
        read_rollouts([tmp_path / "r.jsonl"])
    (tmp_path / "r.jsonl").write_text('{"id": "p", "reward": 1' + "0" * 400 + "}\n")
    with pytest.raises(DataError, match=r"field 'reward'.*expected a number"):
        read_rollouts([tmp_path / "r.jsonl"])


def test_ids_of_rollouts_are_no_ids_of_prompts(tmp_path: Path) -> None:
    """Each row has an id of its own, and two prompts come three times each: the texts identify them."""
    rows = [{"id": f"row{place}", "prompt": f"p{place % 2}", "reward": 0.0} for place in range(6)]
    for rollouts in read_both(tmp_path, rows):
        assert [row["prompt_id"] for row in rollouts] == ["p0", "p1"] * 3


@pytest.mark.parametrize(
    ("rows", "ids", "texts"),
    [
        ([{"uuid": "u1", "prompt": "p"}, {"uuid": "u2", "prompt": "p"}], ["p", "p"], None),
        ([{"prompt": "p", "problem_id": None}, {"prompt": "q", "problem_id": 1.5}], ["p", "q"], None),
        ([{"id": 1, "question": "A"}, {"id": 1, "question": "B"}], ["1", "1"], None),
        ([{"instruction": "do", "input": "a", "output": "o"}, {"instruction": "do", "input": "b"}], ["a", "b"], "o"),
        (
            [{"input": "<chat>a", "output": "o", "query": "a", "response": "r", "step": 1, "score": 1.0}],
            ["<chat>a"],
            "o",
        ),
        ([{"id": 1, "solution": "gold"}], ["1"], None),
        ([{"id": 1, "text": "t", "response": "r"}], ["1"], "t"),
    ],
)
def test_a_further_column_does_not_replace_what_identifies_a_rollout(
    tmp_path: Path, rows: list[dict[str, Any]], ids: list[str], texts: str | None
) -> None:
    for read in read_both(tmp_path, [{"reward": 1.0, **row} if "step" not in row else row for row in rows]):
        assert [row["prompt_id"] for row in read] == ids
        assert read[0].get("y_text") == texts


def test_ids_of_recorded_texts_keep_their_order_and_a_solution_is_no_completion(tmp_path: Path) -> None:
    from rich.console import Console

    from mutualrl.evaluation.score_file import score_file
    from mutualrl.sources.layouts import find_layout
    from mutualrl.sources.section import Columns

    layout = find_layout(["id", "problem_id", "completion", "y_text"], Columns(), "file")
    assert layout.ids == ("problem_id", "id")
    assert layout.texts == ("completion",)
    row = {"problem": "1+1?", "solution": "It is \\boxed{2}.", "answer": "2"}
    (tmp_path / "math.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="no field 'completion'"):
        score_file(tmp_path / "math.jsonl", (), Console())


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("logprobs", [[{"token": "a", "logprob": -1.0}]], "field 'logprobs'"),
        ("token_ids", [["1", "2"]], "row 1, field 'token_ids': found .*, expected a list of non-negative integers"),
        ("token_ids", [[1.5]], "expected a list of non-negative integers"),
        ("token_ids", [[-1]], "expected a list of non-negative integers"),
        ("token_ids", [[True]], "expected a list of non-negative integers"),
    ],
)
def test_lists_in_parquet_are_checked_as_those_in_lines(
    tmp_path: Path, column: str, values: list[Any], message: str
) -> None:
    pq.write_table(pa.table({"id": ["p"], "reward": [1.0], column: values}), tmp_path / "r.parquet")
    with pytest.raises(DataError, match=message):
        read_rollouts([tmp_path / "r.parquet"])


def test_types_that_a_tool_chose_for_texts_are_read(tmp_path: Path) -> None:
    columns = {"id": [1.0, 2.0], "reward": [1, 0], "group": [3, 4], "completion": [b"a", b"b"], "prompt": [7, 8]}
    pq.write_table(pa.table({**columns, "ended": [1, 0]}), tmp_path / "r.parquet")
    read = read_rollouts([tmp_path / "r.parquet"]).to_pylist()
    assert [(row["prompt_id"], row["group"], row["y_text"], row["x_text"], row["ended"]) for row in read] == [
        ("1", "3", "a", "7", True),
        ("2", "4", "b", "8", False),
    ]


def test_a_row_without_a_policy_beside_an_empty_one_is_refused(tmp_path: Path) -> None:
    rows = [{"policy": "", "id": "p", "reward": 1}, {"id": "p", "reward": 1}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="row 2: no field 'policy'"):
        read_rollouts([tmp_path / "r.jsonl"])


def test_a_dump_whose_steps_are_null_is_of_one_round(tmp_path: Path) -> None:
    table = pa.table({"step": pa.nulls(1, pa.int64()), "prompt": ["p"], "completion": ["c"], "good": [1.0]})
    pq.write_table(table, tmp_path / "r.parquet")
    assert read_rollouts([tmp_path / "r.parquet"])["round"].to_pylist() == [0]


def test_texts_and_truth_values_of_a_value() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert texts_of("x") == ["x"]
    assert texts_of(chat) == ["c", "a\nb\nc"]
    assert texts_of([{"role": "system", "content": "s"}]) == ["s"]
    assert texts_of(3) is None
    assert texts_of(["a"]) is None
    assert [truth_of(value) for value in (True, "Yes", 1, "no", 0.0, "perhaps", None)] == [
        *(True, True, True, False, False, None, None),
    ]
