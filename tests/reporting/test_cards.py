"""Model cards: published without private paths or tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from made_runs import add_model, edit_recipe, made_run
from mutualrl.console.display import last_parts
from mutualrl.errors import RecipeError
from mutualrl.recipes import Request, resolve
from mutualrl.reporting.card import write_cards

HOME = "/home/somebody/secret-project"


def test_card_has_only_the_last_part_of_each_path(tmp_path: Path) -> None:
    command = ["mutualrl", "train", "--data", f"{HOME}/rows.jsonl", "--set", "task.reward=~/own/judge.py:score"]
    run = made_run(tmp_path / "r", "sgt", command=command)

    def change(recipe: dict[str, Any]) -> None:
        recipe["policies"] = [{"name": name, "model": f"{HOME}/models/{name}"} for name in ("ada", "bob")]
        recipe["task"] |= {"data": f"{HOME}/rows.jsonl", "validation_data": "hub:owner/name"}
        recipe["regime"] |= {"file": f"{HOME}/rule.py:SPEC"}

    edit_recipe(run, change)
    for name in ("ada", "bob"):
        add_model(run, name)
    cards = [path.read_text() for path in write_cards(run)]
    assert len(cards) == 2
    for text in cards:
        assert "somebody" not in text
        assert "secret-project" not in text
        assert "own/judge.py" not in text
        assert "--data rows.jsonl" in text
        assert "task.reward=judge.py:score" in text
        assert "hub:owner/name" in text
    assert "`bob` (`bob`)" in cards[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data /a/b/c.jsonl", "--data c.jsonl"),
        ("task.data=/a/b", "task.data=b"),
        ('{"data": "/a/b/c d"}', '{"data": "c d"}'),
        ("~/x/y.py:f", "y.py:f"),
        ("hub:owner/name", "hub:owner/name"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://host/path/file", "https://host/path/file"),
        ("runs/mine", "runs/mine"),
        ("1/2 and 3 / 4", "1/2 and 3 / 4"),
    ],
)
def test_paths_in_text_are_shortened(text: str, expected: str) -> None:
    assert last_parts(text) == expected


@pytest.mark.parametrize("key", ["trainer.hub_token=hf_abc", "trainer.model_init_kwargs={token: hf_abc}"])
def test_token_in_a_recipe_is_rejected_and_not_echoed(key: str) -> None:
    with pytest.raises(RecipeError, match="HF_TOKEN") as caught:
        resolve(Request(pool="tiny", regime="grpo", assignments=(key,)))
    assert "hf_abc" not in str(caught.value)
