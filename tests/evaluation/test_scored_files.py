"""Exact and lenient scores of existing completions, hostile ones included, through the real command line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli

needs_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def score(cli: Cli, path: Path, *flags: str) -> dict[str, Any]:
    completed = cli("eval", "--score", path, "--json", *flags)
    assert completed.returncode == 0, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


def test_every_gold_solution_is_correct_and_shuffled_ones_are_wrong(
    cli_here: Cli, real_data: Path, tmp_path: Path
) -> None:
    gold = []
    for name in ("math_train", "math500"):
        with (real_data / "math" / f"{name}.jsonl").open() as file:
            gold += [row for row in map(json.loads, file) if row.get("solution")]
    rows = [{"completion": row["solution"], "answer": row["answer"]} for row in gold]
    result = score(cli_here, write(tmp_path / "gold.jsonl", rows))
    assert (result["n"], result["correct"], result["accuracy"], result["no_box"]) == (4181, 4181, 1.0, 0.0)
    shifted = [{"completion": row["solution"], "answer": gold[i - 1]["answer"]} for i, row in enumerate(gold)]
    expected = sum(row["answer"].strip() == gold[i - 1]["answer"].strip() for i, row in enumerate(gold))
    result = score(cli_here, write(tmp_path / "moved.jsonl", shifted))
    assert (result["n"], result["correct"]) == (4181, expected)
    assert result["accuracy"] < 0.03


def test_boxes_of_every_kind(cli_here: Cli, tmp_path: Path) -> None:
    cases = [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{1} \boxed{2}", "2", True),
        (r"\boxed{3", "3", False),
        (r"\boxed{}", "1", False),
        (r"\boxed{ \text{Yes} }", r"\text{Yes}", True),
        (r"\boxed{é}", "é", True),
        (r"\boxed{e\u0301}", "\u00e9", False),
        (r"\boxed{\boxed{7}}", r"\boxed{7}", True),
        ("7", "7", False),
        (r"\boxed{12}", 12, True),
        (r"\boxed{12.0}", "12", False),
    ]
    rows = [{"completion": completion, "answer": answer} for completion, answer, _ in cases]
    result = score(cli_here, write(tmp_path / "s.jsonl", rows))
    assert (result["n"], result["correct"]) == (len(cases), sum(correct for *_, correct in cases))
    assert result["no_box"] == 2 / len(cases)


HOSTILE = {
    "colour": "\x1b[31m\x1b]8;;http://x\x07\\boxed{4}",
    "bidi": "\u202e\u2066[/bold]\\boxed{4}",
    "nul": "\x00\\boxed{4}",
    "backslashes": "\\" * 1_000_000,
    "open boxes": "\\boxed{" * 200_000,
    "long": "\\boxed{4}" + "x" * 10_000_000,
    "tower": "\\boxed{9^{9^{9}}}",
    "factorials": "\\boxed{((10!)!)!}",
    "digits": "\\boxed{" + "9" * 100_000 + "}",
    "surrogate": "\ud800\\boxed{4}",
}


@pytest.mark.release
@needs_verify
def test_hostile_completions_pass_both_scorers_within_the_deadline(cli_here: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "h.jsonl", [{"completion": text, "answer": "4", "group": "x"} for text in HOSTILE.values()])
    result = score(cli_here, path, "--also", "math-verify")
    assert (result["n"], result["correct"]) == (10, 5)
    lenient = result["math_verify"]
    assert (lenient["n"], lenient["correct"]) == (10, 5)
    assert 1 <= lenient["unverified"] == result["unverified"] <= 3
    shown = cli_here("eval", "--score", path, "--also", "math-verify")
    assert shown.returncode == 0
    assert not set(shown.stdout) & set("\x1b\x07\u202e\u2066\x00")


@needs_verify
def test_lenient_score_accepts_equivalent_answers(cli_here: Cli, tmp_path: Path) -> None:
    pairs = [(r"\boxed{1/2}", r"\frac{1}{2}"), (r"\boxed{0.5}", r"\frac{1}{2}"), (r"\boxed{3}", "4"), ("nothing", "4")]
    result = score(
        cli_here,
        write(tmp_path / "s.jsonl", [{"completion": c, "answer": a} for c, a in pairs]),
        "--also",
        "math-verify",
    )
    assert result["correct"] == 0
    assert result["math_verify"] == {"n": 4, "correct": 2, "accuracy": 0.5, "unverified": 0}


@pytest.mark.extended
@needs_verify
def test_scorer_that_dies_or_hangs_is_replaced_and_leaves_no_process() -> None:
    import psutil

    from mutualrl.evaluation.verify import verdicts

    towers = [("\\boxed{9^{9^{9}}}", "4")] * 3
    result = verdicts([*towers, ("\\boxed{4}", "4"), *towers, ("\\boxed{5}", "4")])
    assert result == [None, None, None, True, None, None, None, False]
    assert not [p for p in psutil.Process().children(recursive=True) if "verify_worker" in " ".join(p.cmdline())]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"completion": "x", "answer": "1"}, {"completion": "x"}], "row 2: no field 'answer'"),
        ([{"answer": "1"}], "row 1: no field 'completion'"),
        ([{"completion": None, "answer": "1"}], "row 1, field 'completion': found None"),
        ([{"completion": ["x"], "answer": "1"}], "row 1, field 'completion': found ['x'], expected a string"),
        ([{"completion": "x", "answer": ""}], "row 1, field 'answer': found ''"),
        ([{"completion": "x", "answer": True}], "row 1, field 'answer': found True"),
        (["not json"], "row 1: not a line of JSON"),
        ([], "the file has no rows"),
    ],
)
def test_invalid_row_is_rejected_by_number(cli_here: Cli, rows: list[Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", rows)
    result = cli_here("eval", "--score", path, "--json")
    assert result.returncode == 2
    error = json.loads(result.stdout)["error"]
    assert message in error["message"]
    assert "bad.jsonl" in error["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "tiny:ada"), "--model: no effect with --score"),
        (("--suite", "math", "--limit", "3"), "--suite, --limit: no effect with --score"),
        (("--also", "sympy"), "--also sympy: expected math-verify"),
    ],
)
def test_flags_without_effect_on_score_are_rejected(
    cli_here: Cli, flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = cli_here("eval", "--score", write(tmp_path / "s.jsonl", [{"completion": "x", "answer": "1"}]), *flags)
    assert result.returncode == 2
    assert message in result.stderr
