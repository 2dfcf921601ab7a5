"""Every template against hand-written prompts from the paper, and against every row of the real data sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mutualrl.errors import DataError, UsageError
from mutualrl.storage.hub import OFFLINE
from mutualrl.tasks import TASKS, TaskSource, get_task
from mutualrl.tasks.mixture import PAPER

FIXTURES = Path(__file__).parent / "fixtures"


def rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.mark.parametrize("name", PAPER)
def test_prompts_and_answers_match_the_hand_written_ones(name: str) -> None:
    prompts = get_task(name).read("validation", TaskSource(validation_data=FIXTURES / f"{name}.jsonl")).prompts
    golden = json.loads((FIXTURES / f"{name}.golden.json").read_text())
    assert len(golden) >= 4
    assert [{"prompt": p.text, "answer": p.answer} for p in prompts] == golden


def label_of(task: str, row: dict[str, Any]) -> str:
    """Return the answer of a real row, computed independently of the task."""
    if task == "boolq":
        return {True: "Yes", False: "No"}[row["answer"]]
    if task in ("arc", "openbookqa"):
        return "ABCDE"[row["choices"]["label"].index(row["answerKey"])]
    return {"piqa": "AB", "hellaswag": "ABCD", "social_i_qa": "-ABC"}[task][int(row["label"])]


@pytest.mark.parametrize("task", [name for name in PAPER if name != "math"])
def test_labels_are_correct_for_every_real_row_and_none_is_dropped(task: str, real_data: Path) -> None:
    for path in sorted((real_data / "qa" / task).glob("*.jsonl")):
        source = rows(path)
        data = get_task(task).read("validation", TaskSource(validation_data=path))
        assert not data.dropped
        assert [p.answer for p in data.prompts] == [label_of(task, row) for row in source]
        assert len({p.id for p in data.prompts}) == len(source)


def test_ranges_and_letters_match_the_choices_of_a_row(real_data: Path) -> None:
    path = real_data / "qa" / "arc" / "ARC-Easy.validation.jsonl"
    prompts = get_task("arc").read("validation", TaskSource(validation_data=path)).prompts
    shapes = Counter(
        (text.split("Which option (")[1][:3], text.rpartition("\n")[2][:2]) for text in (p.text for p in prompts)
    )
    assert shapes == {("A-D", "D."): 567, ("A-E", "E."): 2, ("A-C", "C."): 1}


def test_two_math_rows_without_an_answer_are_counted_and_reported(real_data: Path) -> None:
    data = get_task("math").read("validation", TaskSource(validation_data=real_data / "math" / "math_train.jsonl"))
    assert (len(data.prompts), len(data.dropped)) == (7498, 2)
    assert all("math_train.jsonl, row " in line and "its answer is empty" in line for line in data.dropped)
    assert {p.facets["level"] for p in data.prompts} == {"1", "2", "3", "4", "5", "?"}


def test_answers_parsed_from_solutions_match_the_given_ones(real_data: Path, tmp_path: Path) -> None:
    source = rows(real_data / "math" / "math500.jsonl")
    path = write(tmp_path / "m.jsonl", *({k: v for k, v in row.items() if k != "answer"} for row in source))
    prompts = get_task("math").read("validation", TaskSource(validation_data=path)).prompts
    assert [p.answer for p in prompts] == [row["answer"] for row in source]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so \\boxed{7}.", "7"),
        ("so $\\boxed 7$.", "7"),
        ("so \\fbox{7}", "7"),
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("let \\boxed{a} be; so $x=\\boxed 7$", "7"),
    ],
)
def test_old_boxes_in_gold_solutions_are_parsed(solution: str, answer: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", {"problem": "p", "solution": solution, "level": "Level 3", "type": "Algebra"})
    (prompt,) = get_task("math").read("validation", TaskSource(validation_data=path)).prompts
    assert (prompt.answer, prompt.group, prompt.facets) == (answer, "Algebra", {"level": "3"})


ARC = {"id": "a", "question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"}
PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}
BOOLQ = {"passage": "p", "question": "q", "answer": True}
HELLASWAG = {"ctx": "c", "endings": ["a", "b"], "label": "0"}


@pytest.mark.parametrize(
    ("task", "good", "bad", "message"),
    [
        ("boolq", BOOLQ, BOOLQ | {"answer": "yes"}, "row 2, field 'answer': found 'yes', expected true or false"),
        ("boolq", BOOLQ, BOOLQ | {"passage": " "}, "row 2, field 'passage': found ' ', expected a non-empty"),
        ("boolq", BOOLQ, PIQA, "row 2: no field 'passage' .*these are the fields of task 'piqa'"),
        ("piqa", PIQA, PIQA | {"label": 2}, "row 2, field 'label': found 2, expected 0 to 1"),
        ("piqa", PIQA, PIQA | {"label": -1}, "row 2, field 'label': found -1: a split without public labels"),
        ("piqa", PIQA, PIQA | {"label": True}, "row 2, field 'label': found True"),
        ("piqa", PIQA, PIQA | {"sol2": None}, "row 2, field 'sol2': found None, expected a string"),
        ("hellaswag", HELLASWAG, HELLASWAG | {"label": ""}, "without public labels"),
        ("hellaswag", HELLASWAG, HELLASWAG | {"endings": "ab"}, "row 2, field 'endings': found 'ab', expected a list"),
        ("hellaswag", HELLASWAG, HELLASWAG | {"label": "2"}, "field 'label': found '2', expected 0 to 1"),
        ("arc", ARC, ARC | {"answerKey": "C", "id": "b"}, "field 'answerKey': found 'C', expected one of A, B"),
        ("arc", ARC, ARC | {"answerKey": ""}, "without public labels"),
        ("arc", ARC, ARC | {"choices": {"text": ["x"], "label": ["A"]}}, "field 'choices': found \\['x'\\]"),
        ("arc", ARC, ARC | {"choices": {"text": ["x", "y"], "label": ["A", "A"]}}, "a label for each of the 2 texts"),
        ("arc", ARC, ARC | {"choices": ["x", "y"]}, "expected an object with 'text' and 'label'"),
        ("arc", ARC, ARC, "row 2: the same prompt and id as row 1"),
        ("math", {"problem": "p", "answer": "1"}, {"problem": "p", "solution": "none"}, "ends in .*boxed"),
    ],
)
def test_invalid_row_is_reported(task: str, good: object, bad: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", good, bad)
    with pytest.raises(DataError, match=message) as error:
        get_task(task).read("validation", TaskSource(validation_data=path))
    assert str(path) in str(error.value)


def test_directory_is_searched_for_the_split(real_data: Path, tmp_path: Path) -> None:
    qa, arc = TaskSource(validation_data=real_data / "qa"), get_task("arc")
    data = arc.read("validation", qa)
    assert len(data.prompts) == 570 + 299
    assert data.origin == "ARC-Easy.validation.jsonl, ARC-Challenge.validation.jsonl"
    assert Counter(p.group for p in data.prompts) == {"Easy": 570, "Challenge": 299}
    assert len(arc.read("train", TaskSource(data=real_data / "qa")).prompts) == 2251 + 1119
    assert len(get_task("arc-easy").read("validation", qa).prompts) == 570
    assert get_task("math").read("validation", TaskSource(validation_data=real_data)).origin == "math500.jsonl"
    with pytest.raises(DataError, match=r"no file of task 'math'.*expected math/math\.train\.jsonl"):
        get_task("math").read("train", TaskSource(data=tmp_path))
    write(tmp_path / "ARC-Easy.test.jsonl", ARC)
    with pytest.raises(DataError, match=r"needs arc-easy and arc-challenge .*found ARC-Easy"):
        arc.read("validation", TaskSource(validation_data=tmp_path))
    write(tmp_path / "boolq.test.jsonl", BOOLQ)
    (tmp_path / "boolq").mkdir()
    write(tmp_path / "boolq" / "test.jsonl", BOOLQ)
    with pytest.raises(DataError, match="several files could be task 'boolq'"):
        get_task("boolq").read("validation", TaskSource(validation_data=tmp_path))


def test_nothing_is_held_out_if_both_splits_exist(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        write(tmp_path / f"boolq.{split}.jsonl", *(BOOLQ | {"question": f"{split} {i}"} for i in range(80)))
    task, source = get_task("boolq"), TaskSource(data=tmp_path)
    assert [len(task.read(split, source).prompts) for split in ("train", "validation")] == [80, 80]
    (tmp_path / "boolq.validation.jsonl").unlink()
    train, held_out = (task.read(split, source).prompts for split in ("train", "validation"))
    assert len(train) + len(held_out) == 80
    assert 0 < len(held_out) < 16
    quarter = task.read("validation", TaskSource(data=tmp_path, hold_out=0.25)).prompts
    assert len(quarter) == 20
    assert {prompt.text for prompt in held_out} < {prompt.text for prompt in quarter}


CANONICAL = {
    "math": ("EleutherAI/hendrycks_math", "algebra", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "arc": ("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc-challenge": ("allenai/ai2_arc", "ARC-Challenge", "test"),
    "openbookqa": ("allenai/openbookqa", "additional", "test"),
    "boolq": ("google/boolq", None, "validation"),
    "piqa": ("ybisk/piqa", None, "validation"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "social_i_qa": ("allenai/social_i_qa", None, "validation"),
}


@pytest.mark.parametrize("task", CANONICAL)
def test_canonical_hub_data_set_is_the_default(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[object, ...]] = []
    name = task.partition("-")[0].replace("500", "")

    def load(path: str, config: str | None = None, *, split: str, revision: str | None = None) -> list[dict[str, Any]]:
        requested.append((path, config, split))
        fixture_rows = rows(FIXTURES / f"{name}.jsonl")
        return [{**row, "id": f"{config}{i}", "unique_id": f"{config}{i}"} for i, row in enumerate(fixture_rows)]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("mutualrl.tasks.hub_data.hub_problem", lambda: None)
    from mutualrl.tasks.row_task import _prompts

    _prompts.cache_clear()
    data = get_task(task).read("validation", TaskSource())
    _prompts.cache_clear()
    assert requested[0] == CANONICAL[task]
    assert len(requested) == {"math": 7, "arc": 2}.get(task, 1)
    assert CANONICAL[task][2] in data.origin
    assert ("no public labels" in data.origin or "no test split" in data.origin) == (CANONICAL[task][2] == "validation")


def test_error_without_the_hub_names_the_data_option() -> None:
    with pytest.raises(DataError, match=r"'Rowan/hellaswag'.*cannot be loaded from the hub: .*--data"):
        get_task("hellaswag").read("validation", TaskSource())


def test_unknown_task_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown task 'helaswag'.*did you mean 'hellaswag'"):
        get_task("helaswag")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_describes_the_data_it_reads(name: str) -> None:
    task = TASKS[name]
    assert task.name == name
    assert task.reads
    assert task.max_new_tokens > 0


def test_solution_with_an_empty_box_is_dropped_and_reported(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.jsonl", {"problem": "p", "solution": "so \\boxed{}"}, {"problem": "p", "solution": "\\boxed{1}"}
    )
    data = get_task("math").read("validation", TaskSource(validation_data=path))
    assert ([p.answer for p in data.prompts], len(data.dropped)) == (["1"], 1)
    assert "row 1: the box of its solution is empty" in data.dropped[0]


def test_directory_with_only_a_training_split_is_evaluated_on_held_out_rows(tmp_path: Path) -> None:
    (tmp_path / "boolq").mkdir()
    write(tmp_path / "boolq" / "train.jsonl", *(BOOLQ | {"question": f"q{i}"} for i in range(60)))
    task = get_task("boolq")
    train = task.read("train", TaskSource(data=tmp_path)).prompts
    evaluated = task.read("validation", TaskSource(validation_data=tmp_path))
    assert evaluated.origin == "held-out rows of train.jsonl"
    assert len(train) + len(evaluated.prompts) == 60
    assert not {p.text for p in train} & {p.text for p in evaluated.prompts}


def test_hub_reference_is_evaluated_on_the_tasks_split(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def load(path: str, config: str | None = None, *, split: str, revision: str | None = None) -> list[dict[str, Any]]:
        requested.append(split)
        return [BOOLQ]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("mutualrl.tasks.hub_data.hub_problem", lambda: None)
    get_task("boolq").read("validation", TaskSource(validation_data=Path("hub:me/boolq")))
    get_task("boolq").read("train", TaskSource(data=Path("hub:me/boolq"), validation_data=Path("hub:me/boolq")))
    assert requested == ["validation", "train"]


def test_cached_data_set_is_read_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested: list[str] = []

    def load(path: str, config: str | None = None, *, split: str, revision: str | None = None) -> list[dict[str, Any]]:
        requested.append(path)
        return [BOOLQ]

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("mutualrl.tasks.hub_data.hub_problem", lambda: OFFLINE)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    source = TaskSource(validation_data=Path("hub:me/offline"))
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set; add --data FILE"):
        get_task("boolq").read("validation", source)
    assert not requested
    (tmp_path / "me___offline").mkdir()
    assert get_task("boolq").read("validation", source).prompts[0].answer == "Yes"
    assert requested == ["me/offline"]
