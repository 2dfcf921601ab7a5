"""Layouts of recorded files: what is read from a row, and what is refused by file, row and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_files import LAYOUTS, write_jsonl

from mutualrl.errors import DataError
from mutualrl.records import Prompt
from mutualrl.sources.layouts import find_layout, opens_reasoning, read_row, without_reasoning
from mutualrl.sources.matching import PromptIndex, template_of
from mutualrl.sources.recorded import MatchedTexts, read_recorded
from mutualrl.sources.section import Columns
from mutualrl.tasks.rows import DatasetRow
from mutualrl.trajectory import Trajectory

PROMPTS = [Prompt(f"id{n}", f"What is {n} + {n}?", str(2 * n), "g") for n in range(6)]
TEXTS = {
    prompt.text: [f"{prompt.answer} \\boxed{{{prompt.answer}}}", f"it is \\boxed{{{n}}}"]
    for n, prompt in enumerate(PROMPTS)
}


def read(path: Path, columns: Columns | None = None, **options: object) -> MatchedTexts:
    return read_recorded(str(path), columns or Columns(), "keep", PROMPTS, [], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_with_the_same_texts_give_the_same_rollouts(name: str, tmp_path: Path) -> None:
    found = read(LAYOUTS[name](tmp_path / name, TEXTS))
    expected = MatchedTexts()
    for prompt in PROMPTS:
        from mutualrl.sources.layouts import RecordedText

        expected.add([prompt.id], [RecordedText(Trajectory.of_text(text)) for text in TEXTS[prompt.text]])
    assert list(found.in_order()) == list(expected.in_order())
    assert len(found.texts) == 6
    assert found.counts["cut_off"] == (6 if name == "open_r1" else 0)
    assert found.counts["duplicates"] == (6 if name == "synthetic_1" else 0)


def row(**values: object) -> DatasetRow:
    return DatasetRow(values, "file.jsonl", 7)


def texts_of(values: dict[str, object], columns: Columns | None = None, reasoning: str = "keep") -> list[str]:
    layout = find_layout(list(values), columns or Columns(), "file.jsonl")
    read = read_row(DatasetRow(values, "file.jsonl", 7), layout, reasoning)  # type: ignore[arg-type]
    return [r.trajectory.text for r in read.responses if not r.cut and not r.rejected]


def test_texts_that_were_cut_off_are_marked() -> None:
    assert texts_of({"prompt": "p", "generations": ["a", "b"], "finish_reasons": ["stop", "length"]}) == ["a"]
    assert texts_of({"prompt": "p", "completion": "a", "finish_reason": "length"}) == []
    assert texts_of({"prompt": "p", "completion": "a", "ended": False}) == []
    assert texts_of({"prompt": "p", "completion": "a", "is_truncated": True}) == []
    for no in (False, 0, 0.0, "False", "0", "no"):
        assert texts_of({"prompt": "p", "completion": "a", "done": no}, Columns(ended="done")) == []
        assert texts_of({"prompt": "p", "completion": "a", "ended": no}) == []
    for yes in (True, 1, "true", None, ""):
        assert texts_of({"prompt": "p", "completion": "a", "done": yes}, Columns(ended="done")) == ["a"]
    assert texts_of({"prompt": "p", "completion": "a", "is_truncated": "True"}) == []
    assert texts_of({"prompt": "p", "completion": "a", "finish_reason": "MAX_TOKENS"}) == []
    with pytest.raises(DataError, match="row 7, field 'done': found 'maybe', expected true or false"):
        texts_of({"prompt": "p", "completion": "a", "done": "maybe"}, Columns(ended="done"))
    assert texts_of({"prompt": "p", "completion": "<think>a"}) == []
    assert texts_of({"prompt": "p", "completion": "<think>a</think>b"}) == ["<think>a</think>b"]
    assert (
        texts_of(
            {"nodes": [{"message": {"role": "assistant", "content": "a"}}], "calls": [{"finish_reason": "length"}]}
        )
        == []
    )


def test_verdicts_only_leave_texts_out() -> None:
    values: dict[str, object] = {"prompt": "p", "generations": ["a", "b", "c"], "ok": [True, False, None]}
    assert texts_of(values) == ["a", "b", "c"]
    assert texts_of(values, Columns(verdict="ok")) == ["a", "c"]
    for no in ("false", "0", 0, 0.0):
        assert texts_of({"prompt": "p", "completion": "a", "ok": no}, Columns(verdict="ok")) == []


def test_reasoning_can_be_dropped() -> None:
    assert without_reasoning("<think>\nx\n</think>\n\nthe answer") == "the answer"
    assert without_reasoning("x</think>\nthe answer") == "the answer"  # the block begins in the prompt
    thoughts = "<|begin_of_thought|>x<|end_of_thought|>\n\n<|begin_of_solution|>\nthe answer\n<|end_of_solution|>"
    assert texts_of({"prompt": "p", "completion": thoughts}, reasoning="drop") == ["the answer"]
    assert texts_of({"prompt": "p", "completion": "<think>x</think>"}, reasoning="drop") == []
    assert opens_reasoning("<think>a</think> b <think>c")
    assert not opens_reasoning("a</think>b")


def test_written_end_tokens_are_no_part_of_a_text() -> None:
    assert texts_of({"prompt": "p", "completion": "the answer<|im_end|><|endoftext|>"}) == ["the answer"]
    assert texts_of({"prompt": "p", "completion": "the answer<|im_end|>\n"}) == ["the answer"]
    assert texts_of({"prompt": "p", "completion": "an answer\n"}) == ["an answer\n"]
    assert texts_of({"prompt": "p", "completion": "</s>"}) == []


def test_nulls_are_no_texts_and_other_types_are_refused_by_name() -> None:
    assert texts_of({"prompt": "p", "generations": [None, "b"]}) == ["b"]
    assert texts_of({"prompt": "p", "generations": None}) == []
    assert texts_of({"prompt": "p", "generations": None, "finish_reasons": ["stop", "stop"]}) == []
    columns = {"r1_solution_1": "a", "r1_solution_2": None, "r1_solution_3": "c"}
    assert texts_of({"prompt": "p", **columns, "finish_reasons": ["stop", None, "length"]}) == ["a"]
    assert texts_of({"prompt": "p", "completion": "a", "id": float("nan")}) == ["a"]  # a guessed column
    assert texts_of({"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": None}]}) == []
    assert texts_of({"prompt": "p", "r1.sol": "a"}, Columns(text=("r1.sol",))) == ["a"]
    assert texts_of({"prompt": "p", "r1_solution_2": "b", "r1_solution_10": None, "r1_solution_1": "a"}) == ["a", "b"]
    for values, message in (
        ({"prompt": "p", "generations": [1]}, r"file.jsonl, row 7, field 'generations': found 1, expected a string"),
        ({"prompt": "p", "completion": 5}, r"row 7, field 'completion': found 5"),
        ({"conversations": [{"from": None, "value": "x"}]}, r"row 7, field 'conversations': found \{'from': None"),
        ({"prompt": "p", "generations": ["a"], "finish_reasons": ["stop", "stop"]}, "one value per text: 1"),
        ({"prompt": "p", "completion": "\ud800"}, "a lone surrogate"),
        ({"prompt": 5, "completion": "a"}, "field 'prompt': found 5"),
    ):
        with pytest.raises(DataError, match=message):
            texts_of(values)  # type: ignore[arg-type]


def test_columns_that_cannot_be_guessed_are_named() -> None:
    assert texts_of({"q": "p", "r": "a"}, Columns(prompt="q", text=("r",))) == ["a"]
    with pytest.raises(DataError, match=r"no column with responses .found: prompt, teacher."):
        find_layout(["prompt", "teacher"], Columns(), "f")
    with pytest.raises(DataError, match=r"no column with prompts or their ids.*columns.prompt=COLUMN"):
        find_layout(["completion"], Columns(), "f")
    with pytest.raises(DataError, match=r"no column 'ask', which sources.columns names"):
        find_layout(["prompt", "completion"], Columns(prompt="ask"), "f")


def test_long_texts_and_conversations_of_several_turns_are_counted(tmp_path: Path) -> None:
    turns = [{"role": r, "content": "x"} for r in ("user", "assistant", "user", "assistant")]
    turns[0]["content"] = turns[2]["content"] = PROMPTS[0].text
    rows = [
        {"messages": turns},
        {
            "messages": [
                {"role": "user", "content": PROMPTS[1].text},
                {"role": "assistant", "content": "y" * 10_000_000},
            ]
        },
    ]
    rows.append({"messages": [{"role": "user", "content": PROMPTS[2].text}, {"role": "assistant", "content": "z"}]})
    found = read(write_jsonl(tmp_path / "f.jsonl", rows))
    assert (found.counts["several_turns"], found.counts["too_long"]) == (1, 1)
    assert list(found.in_order()) == [("id2", "z")]


def test_prompts_match_by_id_else_by_text_without_whitespace_and_template() -> None:
    prompts = [
        Prompt("1", "Solve: what is 1?\n\nBox it.", "1", "g", columns={"question": "what is  1?"}),
        Prompt("2", "Solve: what is 2?\n\nBox it.", "2", "g"),
        Prompt("chat", "Be brief.\nwhat is 3?", "3", "g", messages=(("system", "Be brief."), ("user", "what is 3?"))),
    ]
    index = PromptIndex(prompts)

    def find(**values: object) -> list[str]:
        return index.find(
            read_row(row(completion="a", **values), find_layout([*values, "completion"], Columns(), "f"), "keep")
        )

    assert find(id=1) == ["1"]
    assert find(id="2", prompt="unknown") == []  # a counter
    assert find(id="chat", prompt="unknown") == ["chat"]
    assert find(id="2", prompt="what is 1?") == ["1"]  # counters of two files may be equal without meaning the same
    assert find(prompt="what is 3?") == ["chat"]
    assert find(prompt=[{"role": "user", "content": " what is\n3? "}]) == ["chat"]
    assert find(prompt="what is 4?") == []
    assert PromptIndex(prompts[:2]).find(
        read_row(row(problem="2?", completion="a"), find_layout(["problem", "completion"], Columns(), "f"), "keep")
    ) == ["2"]
    assert template_of(["Solve 12 now", "Solve 13 now"]) == ("Solve ", " now")
    assert template_of(["same", "same"]) == ("", "")
    assert template_of(["aa", "aaa"]) == ("", "")
    short = [Prompt(str(n), f"Solve: x+1={n}. Answer in a box.", "1", "g") for n in (2, 25)]
    assert PromptIndex(short).of_text("5.") == []
    assert PromptIndex(short).of_text("x+1=25.") == ["25"]
    assert PromptIndex(short).of_text(r"Return your final response within \boxed{}. x+1=2.") == ["2"]


def test_two_prompts_of_one_text_both_get_its_texts(tmp_path: Path) -> None:
    twice = [Prompt("a", "q", "1", "g"), Prompt("b", "q", "1", "g")]
    file = write_jsonl(tmp_path / "f.jsonl", [{"prompt": "q", "completion": "x"}, {"prompt": "q", "completion": "y"}])
    found = read_recorded(str(file), Columns(), "keep", twice, [])
    assert {key for key, _ in found.in_order()} == {"a", "b"}
    assert len(list(found.in_order())) == 4


def test_rendered_prompts_match(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "f.jsonl", [{"prompt": "user\nWhat is 1 + 1?\nassistant\n", "completion": "x"}])
    rendered = [[f"user\n{prompt.text}\nassistant\n" for prompt in PROMPTS]]
    assert list(read(file, rendered=rendered).in_order()) == [("id1", "x")]


def test_no_match_shows_a_prompt_of_each_side(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "f.jsonl", [{"prompt": "Quite\x1b[31m another", "completion": "x"}])
    with pytest.raises(DataError) as caught:
        read(file)
    message = str(caught.value)
    assert "none of its 1 rows is of a training prompt" in message
    assert "'Quite\ufffd[31m another'" in message
    assert "'What is 0 + 0?' (id 'id0')" in message


def test_references_are_read_or_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="recorded texts not found"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no file of recorded texts"):
        read(tmp_path / "empty")
    with pytest.raises(DataError, match="no embedded file 'tiny:none'; expected one of: tiny:book"):
        read_recorded("tiny:none", Columns(), "keep", PROMPTS, [])
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "What is 0 + 0?", "completion": "\xff"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl, row 1: not a line of JSON"):
        read(tmp_path / "bad.jsonl")
    directory = tmp_path / "shards"
    directory.mkdir()
    for number, prompt in enumerate(PROMPTS[:2]):
        LAYOUTS["trl"](directory / f"part{number}", {prompt.text: TEXTS[prompt.text]})
    assert len(read(directory).texts) == 2


def test_solutions_of_the_task_are_a_reference() -> None:
    prompts = [Prompt("a", "q", "1", "g", solution="s"), Prompt("b", "r", "1", "g", columns={"short": "t"})]
    assert list(read_recorded("task", Columns(), "keep", prompts, []).in_order()) == [("a", "s")]
    short = read_recorded("task", Columns(text=("short",)), "keep", prompts, [])
    assert list(short.in_order()) == [("b", "t")]
    with pytest.raises(DataError, match="none of the 2 training prompts has a text in the column 'shrot'"):
        read_recorded("task", Columns(text=("shrot",)), "keep", prompts, [])


def test_conversation_ends_with_the_answer_or_with_thanks(tmp_path: Path) -> None:
    roles = (("user", PROMPTS[1].text), ("assistant", "a"), ("user", "thanks"))
    rows = [{"messages": [{"role": role, "content": text} for role, text in roles]}]
    assert list(read(write_jsonl(tmp_path / "f.jsonl", rows)).in_order()) == [("id1", "a")]


def test_layout_is_that_of_the_first_rows_together(tmp_path: Path) -> None:
    first, second = ({"prompt": PROMPTS[n].text, "r1_solution_1": f"a{n}"} for n in (0, 1))
    rows = [first, {**second, "r1_solution_2": "b", "finish_reason": "stop"}]
    found = read(write_jsonl(tmp_path / "f.jsonl", rows))
    assert sorted(text for _, text in found.in_order()) == ["a0", "a1", "b"]
    rows = [first] * 150 + [{**second, "completion": "b"}, {**second, "r1_solution_2": "b"}]
    with pytest.raises(DataError, match=r"row 152: has the column 'r1_solution_2', which the first 100 rows lack"):
        read(write_jsonl(tmp_path / "g.jsonl", rows))


def test_text_of_a_held_out_prompt_is_left_out_whatever_its_id(tmp_path: Path) -> None:
    held = [Prompt("v", "held out?", "1", "g")]
    rows = [
        {"prompt_id": "id1", "prompt": "held out?", "completion": "x"},
        {"prompt": PROMPTS[2].text, "completion": "y"},
    ]
    file = write_jsonl(tmp_path / "f.jsonl", rows)
    found = read_recorded(str(file), Columns(), "keep", PROMPTS, held)
    assert list(found.in_order()) == [("id2", "y")]
    assert found.validation == {"v"}


def test_other_files_of_a_directory_are_skipped_by_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "readme.jsonl", [{"license": "mit"}])
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    write_jsonl(tmp_path / "z.jsonl", [{"prompt": PROMPTS[0].text, "completion": "x"}])
    found = read(tmp_path)
    assert list(found.in_order()) == [("id0", "x")]
    assert found.skipped == ["readme.jsonl"]
    (tmp_path / "z.jsonl").unlink()
    with pytest.raises(DataError, match=r"readme.jsonl: no column with responses"):
        read(tmp_path)


def test_a_json_document_is_read_as_an_array_an_object_or_lines(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPTS[n].text, "completion": f"x{n}"} for n in range(2)]
    path = tmp_path / "x.json"
    for text in (json.dumps(rows, indent=2), "".join(json.dumps(row) + "\n" for row in rows)):
        path.write_text(text)
        assert list(read(path).in_order()) == [("id0", "x0"), ("id1", "x1")]
    path.write_text(json.dumps(rows[0], indent=2))
    assert list(read(path).in_order()) == [("id0", "x0")]
    for text, message in (
        ("[]", "has no rows"),
        ("[3]", "found int"),
        ("{", "row 1: not a line of JSON"),
        ("3", "found int"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read(path)
