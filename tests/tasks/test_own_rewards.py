"""User rewards: the example in the docs, and the message for a reward that fails."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conftest import REPOSITORY
from mutualrl.cli.results import show_summary
from mutualrl.errors import RewardError
from mutualrl.tasks.rewards import wrap_errors


def test_docs_example_accepts_texts_and_conversations() -> None:
    page = (REPOSITORY / "docs" / "your-own.md").read_text()
    block = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def near" in code)
    names: dict[str, Any] = {}
    exec(block, names)
    near = names["near"]
    assert near(["it is 12", "no"], answer=["12", "3"]) == [1.0, 0.0]
    chats = [[{"role": "assistant", "content": text}] for text in ("it is 12", "no")]
    assert near(chats, answer=["12", "3"]) == [1.0, 0.0]


def test_error_in_a_reward_is_reported_with_file_and_line() -> None:
    def broken(completions: list[str], **columns: object) -> list[float]:
        raise KeyError("no such column")

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"KeyError: 'no such column' \(test_own_rewards.py, line {line}\)"):
        wrap_errors(broken, "broken")(["x"])


@pytest.mark.parametrize(("no_box", "measure"), [(0.0, "Greedy accuracy"), (None, "Mean reward of greedy completions")])
def test_mean_reward_is_not_labelled_accuracy(
    no_box: float | None, measure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = {"accuracy": 0.1, "by_group": {"all": 0.1}, "no_box": no_box, "n": 6}
    policy = {
        "initial_validation": validation,
        "validation": validation,
        "rescued_pairs": 0,
        "wait_seconds": 0.0,
    }
    summary = {"policies": {"ada": policy}, "task": "dataset", "regime": "sgt", "steps": 3, "seed": 0}
    show_summary({**summary, "lost": [], "seconds": 1.0}, "runs/x")
    output = capsys.readouterr().out
    assert f"{measure} on held-out dataset" in output
    header = next(line for line in output.splitlines() if "rescued pairs" in line)
    assert header.count("all") == 1  # a single group is not shown twice
