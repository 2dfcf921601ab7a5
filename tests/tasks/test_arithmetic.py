from __future__ import annotations

import pytest

from mutualrl.errors import UsageError
from mutualrl.tasks.arithmetic import (
    HELD_OUT,
    OPERATIONS,
    ArithmeticProblem,
    ArithmeticTask,
    all_problems,
    split_problems,
)
from mutualrl.tasks.base import TaskSource
from mutualrl.tasks.boxed import boxed_score


def test_working_ends_in_the_answer() -> None:
    product, total = ArithmeticProblem("*", (4, 3, 5)), ArithmeticProblem("+", (4, 3, 5))
    assert (product.prompt, product.working, product.answer) == ("4*3*5:", r" 12 60 \boxed{60}", "60")
    assert (total.prompt, total.working, total.answer) == ("4+3+5:", r" 7 12 \boxed{12}", "12")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_held_out_problems_are_never_trained_on(operation: str) -> None:
    train, held_out = split_problems(operation)  # type: ignore[arg-type]
    assert len(held_out) == HELD_OUT
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == set(all_problems(operation))  # type: ignore[arg-type]
    assert all(boxed_score(p.working, p.answer) == 1.0 for p in train + held_out)


def test_prompts_depend_only_on_the_seed_and_operations_are_balanced() -> None:
    task = ArithmeticTask()
    first, again = task.read("train", TaskSource(seed=3)).prompts, task.read("train", TaskSource(seed=3)).prompts
    assert first == again
    assert first != task.read("train", TaskSource(seed=4)).prompts
    groups = [p.group for p in first]
    assert groups.count("+") == groups.count("*")
    assert len({p.id for p in first}) == len(first)
    validation = task.read("validation", TaskSource(seed=3)).prompts
    assert validation == task.read("validation", TaskSource(seed=4)).prompts
    assert not {p.text for p in validation} & {p.text for p in first}


def test_data_file_is_rejected(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(UsageError, match="makes its own problems"):
        ArithmeticTask().read("train", TaskSource(data=Path("x.jsonl")))
