"""Real-world data files: CSV from spreadsheets, other encodings, directories of splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mutualrl.errors import DataError
from mutualrl.tasks import TaskSource, get_task


def read(path: Path, task: str = "dataset") -> list[tuple[str, str]]:
    prompts = get_task(task).read("validation", TaskSource(validation_data=path)).prompts
    return [(p.text, p.answer) for p in prompts]


def test_csv_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes('\ufeffprompt,answer\r\n4+3:,7\r\n"a,b\nc",8\r\n'.encode())
    assert read(path) == [("4+3:", "7"), ("a,b\nc", "8")]
    long, other = "x" * 200_000, tmp_path / "long.csv"
    other.write_text(f"prompt,answer\n{long},1\n")
    assert read(other) == [(long, "1")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\n999+1:,1,000\n", "row 1: 1 more fields than the header has columns"),
        (b'prompt,answer\n4+3:,"7\n4+4:,8\n', "not CSV"),
        (b'prompt,answer\n4+3:,7\n4+4:,"8"x\n', "row 2: not CSV"),
        (b"prompt,answer\n4+3:,7\ncaf\xe9,8\n", "not UTF-8"),
        (b"prompt,answer\n4+3:\n", "row 1: 1 fewer fields than the header has columns: no value for 'answer'"),
        (b"prompt,answer\n4+3:,   \n", "row 1, field 'answer': is blank"),
        (b"prompt,answer\n", "no rows"),
    ],
)
def test_csv_that_would_change_labels_or_lose_rows_is_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b", "label": "1" * 5000}, "field 'label'"),
        ("math", {"problem": "p", "answer": "1", "level": "\ud800"}, "field 'level': a lone surrogate"),
        ("dataset", {"prompt": "p", "answer": "1", "prompt_id": "\ud800"}, "field 'prompt_id': a lone surrogate"),
        ("dataset", {"prompt": "p", "answer": " \t"}, "field 'answer': is blank"),
    ],
)
def test_unusable_values_are_reported(task: str, row: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        read(path, task)


def test_empty_parquet_file_is_rejected(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="the file has no rows"):
        read(tmp_path / "d.parquet")


def test_directory_provides_the_training_split_and_the_test_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": f"{split}:", "answer": "1"}) + "\n")
    task = get_task("dataset")
    source = TaskSource(data=tmp_path, validation_data=tmp_path)
    assert [p.text for p in task.read("train", source).prompts] == ["train:"]
    assert [p.text for p in task.read("validation", source).prompts] == ["test:"]


def test_deep_directories_are_not_searched(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "boolq.test.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="no file of task 'boolq'"):
        get_task("boolq").read("validation", TaskSource(validation_data=tmp_path))
