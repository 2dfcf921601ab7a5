from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Cli
from mutualrl.errors import DataError
from mutualrl.tasks import TASKS
from mutualrl.tasks.base import TaskSource
from mutualrl.tasks.boxed import boxed_score

ROW = {
    "question": "Natalia sold 480 clips in April and half as many in May. How many altogether?",
    "answer": "She sold 480/2 = <<480/2=240>>240 in May.\nTogether 480+240 = <<480+240=720>>720.\n#### 1,720",
}


def read(path: Path, *rows: object) -> list[object]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(TASKS["gsm8k"].read("validation", TaskSource(validation_data=path)).prompts)


def test_number_after_the_marker_is_the_answer_and_the_rationale_the_solution(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.test.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    (prompt,) = TASKS["gsm8k"].read("validation", TaskSource(validation_data=path)).prompts
    assert prompt.answer == "1720"
    assert prompt.text == (
        f"{ROW['question']}\n\nLet's think step by step and output the final answer within \\boxed{{}}."
    )
    assert prompt.solution == ("She sold 480/2 = 240 in May.\nTogether 480+240 = 720.\n\\boxed{1720}")
    assert boxed_score(prompt.solution, prompt.answer) == 1


@pytest.mark.parametrize("answer", ["42", "so 42\n####", "#### forty", "#### 42 apples"])
def test_row_without_a_final_number_is_refused_by_name(tmp_path: Path, answer: str) -> None:
    with pytest.raises(DataError, match=r"row 2, field 'answer': found .*#### NUMBER"):
        read(tmp_path / "g.jsonl", ROW, {**ROW, "answer": answer})


@pytest.mark.parametrize(("final", "expected"), [("-3", "-3"), ("2.5", "2.5"), ("12,345,678", "12345678")])
def test_numbers_of_the_data_set_are_read(tmp_path: Path, final: str, expected: str) -> None:
    (prompt,) = read(tmp_path / "g.jsonl", {**ROW, "answer": f"so\n#### {final}"})
    assert prompt.answer == expected  # type: ignore[attr-defined]


def test_task_is_listed_and_trains(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.train.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}+1?", "answer": f"{i}+1\n#### {i + 1}"}) + "\n" for i in range(96))
    )
    shown = cli_here("tasks", "show", "gsm8k", "--data", "gsm8k.train.jsonl", "--json")
    assert shown.returncode == 0, shown.stderr
    plan = cli_here("train", "--pool", "tiny", "--task", "gsm8k", "--data", "gsm8k.train.jsonl", "--dry-run", "--json")
    assert plan.returncode == 0, plan.stderr
