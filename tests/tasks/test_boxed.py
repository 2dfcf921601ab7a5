from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import lines_run
from mutualrl.tasks.boxed import boxed_reward, boxed_score, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b}}", r"a \boxed{b}"),
        (r"\boxed{3} and an open \boxed{4", "3"),
        (r"\boxed{3 \boxed{4}", "4"),
        (r"} \boxed{5} {", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{ \text{Yes} }", r" \text{Yes} "),
        ("no box at all", None),
        (r"\boxed 7", None),
        (r"\boxed{7", None),
        (r"\boxed{7 \\}", r"7 \\"),
        (r"\boxed{\begin{pmatrix}1\\{-2}\end{pmatrix}}", r"\begin{pmatrix}1\\{-2}\end{pmatrix}"),
        (r"\\boxed{8}", "8"),
        (r"\boxed{\\\}}", r"\\\}"),
    ],
)
def test_last_balanced_box_is_used(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_score_is_exact_up_to_outer_whitespace() -> None:
    assert boxed_score(r"\boxed{ 12 }", "12") == 1.0
    assert boxed_score(r"\boxed{12.0}", "12") == 0.0
    assert boxed_score("12", "12") == 0.0


def test_reward_accepts_plain_and_conversational_completions() -> None:
    assert boxed_reward([r"\boxed{1}", r"\boxed{2}"], answer=["1", "1"]) == [1.0, 0.0]
    assert boxed_reward([[{"role": "assistant", "content": r"\boxed{1}"}]], answer=["1"]) == [1.0]


@given(st.text(alphabet="ab{}\\ ", max_size=40))
def test_balanced_box_is_found_after_any_text(before: str) -> None:
    assert last_boxed(before + "\n" + r"\boxed{x{y}z}") == "x{y}z"


@pytest.mark.parametrize("piece", [r"\boxed{", "{", "}", "\\", r"\boxed{1}"])
def test_cost_is_linear_in_the_length(piece: str) -> None:
    """Count executed lines of Python, which do not depend on the load of the machine."""
    counts = [lines_run(lambda text=piece * n: last_boxed(text)) for n in (500, 1000, 2000)]
    assert counts[2] - counts[1] <= 2 * (counts[1] - counts[0]) + 10


def test_texts_of_ten_megabytes_are_parsed() -> None:
    assert last_boxed("\\boxed{" * 1_500_000) is None
    assert last_boxed("{" * 5_000_000 + "\\boxed{7}") == "7"


def test_every_gold_solution_of_math_scores_1(real_data: Path) -> None:
    scored = 0
    for name in ("math_train", "math500"):
        for line in (real_data / "math" / f"{name}.jsonl").open():
            row = json.loads(line)
            if row.get("solution"):
                scored += 1
                assert boxed_score(row["solution"], row["answer"]) == 1.0
    assert scored == 4181
