from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mutualrl.errors import DataError
from mutualrl.tasks import TASKS, load_prompts
from mutualrl.tasks.base import TaskSource


def rows(path: Path, *values: object) -> Path:
    path.write_text("\n".join(v if isinstance(v, str) else json.dumps(v) for v in values) + "\n")
    return path


def test_template_matches_the_paper(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"problem": "1+1?", "answer": "2", "type": "Algebra", "level": "Level 1"})
    (prompt,) = TASKS["math"].read("validation", TaskSource(validation_data=path)).prompts
    assert prompt.text == "1+1?\n\nLet's think step by step and output the final answer within \\boxed{}."
    assert (prompt.answer, prompt.group) == ("2", "Algebra")


def test_validation_is_held_out_from_the_training_rows(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", *({"problem": f"p{i}", "answer": "1"} for i in range(300)))
    task, source = TASKS["math"], TaskSource(data=path)
    train, validation = task.read("train", source).prompts, task.read("validation", source).prompts
    assert len(train) + len(validation) == 300
    assert 5 < len(validation) < 40
    assert not {p.text for p in train} & {p.text for p in validation}


@pytest.mark.parametrize(
    ("bad_row", "message"),
    [
        ({"problem": "x"}, "row 2: no field 'answer'"),
        ({"problem": "x", "answer": None}, "row 2, field 'answer': found None"),
        ({"problem": "x", "answer": 3}, "row 2, field 'answer': found 3"),
        ({"answer": "3"}, "row 2: no field 'problem'"),
        ({"problem": "a\ud800b", "answer": "3"}, "row 2, field 'problem': a lone surrogate"),
        ({"problem": "x", "answer": "3", "unique_id": "\ud800"}, "row 2, field 'unique_id': a lone surrogate"),
        ("[" * 200_000, "row 2: not a line of JSON"),
        ("not json", "row 2: not a line of JSON"),
        ("[1]", "row 2: found list"),
    ],
)
def test_invalid_row_is_reported(tmp_path: Path, bad_row: object, message: str) -> None:
    path = rows(tmp_path / "a.jsonl", {"problem": "x", "answer": "1"}, bad_row)
    with pytest.raises(DataError, match=message.replace("(", r"\(")) as error:
        TASKS["math"].read("train", TaskSource(data=path))
    assert str(path) in str(error.value)


def test_missing_and_empty_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not found.*nope\.jsonl"):
        TASKS["math"].read("train", TaskSource(data=tmp_path / "nope.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="has no rows"):
        TASKS["math"].read("train", TaskSource(data=tmp_path / "empty.jsonl"))


def test_file_too_small_for_held_out_rows_is_rejected(tmp_path: Path) -> None:
    from mutualrl.recipes import Request, resolve
    from mutualrl.recipes.agreement import load_recipe_prompts

    (tmp_path / "p.yaml").write_text('policies: [{name: a, model: "tiny:ada"}]')
    path = rows(tmp_path / "a.jsonl", {"problem": "p1", "answer": "1"})
    recipe = resolve(Request(pool=str(tmp_path / "p.yaml"), task="math", data=path))
    with pytest.raises(DataError, match=r"has no validation prompts; provide more data or set task.validation_data"):
        load_recipe_prompts(recipe, "validation")


def test_row_with_empty_answer_is_dropped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rows(tmp_path / "a.jsonl", {"problem": "x", "answer": ""}, {"problem": "y", "answer": "1"})
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(TASKS["math"], "validation", TaskSource(validation_data=path))
    assert [p.text[0] for p in prompts] == ["y"]
    assert "left out 1 rows" in caplog.text
    assert f"{path}, row 1: its answer is empty" in caplog.text
