"""The page about own rewards, executed; and the message about one that fails."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conftest import REPOSITORY
from mutualrl.cli.results import show_summary
from mutualrl.errors import RewardError
from mutualrl.tasks.rewards import wrap_errors


def test_the_example_of_the_docs_takes_texts_and_conversations() -> None:
    page = (REPOSITORY / "docs" / "your-own.md").read_text()
    block = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def near" in code)
    names: dict[str, Any] = {}
    exec(block, names)
    near = names["near"]
    assert near(["it is 12", "no"], answer=["12", "3"]) == [1.0, 0.0]
    chats = [[{"role": "assistant", "content": text}] for text in ("it is 12", "no")]
    assert near(chats, answer=["12", "3"]) == [1.0, 0.0]


def test_an_error_in_a_reward_is_named_with_its_file_and_line() -> None:
    def broken(completions: list[str], **columns: object) -> list[float]:
        raise KeyError("no such column")

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"KeyError: 'no such column' \(test_own_rewards.py, line {line}\)"):
        wrap_errors(broken, "broken")(["x"])


@pytest.mark.parametrize(("no_box", "measure"), [(0.0, "Greedy accuracy"), (None, "Mean reward of greedy completions")])
def test_a_mean_reward_is_not_called_accuracy(
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
    shown = capsys.readouterr().out
    assert f"{measure} on held-out dataset" in shown
    head = next(line for line in shown.splitlines() if "rescued pairs" in line)
    assert head.count("all") == 1  # a single group is not shown twice
