"""The one walk over a recipe's sections: which values may be beside its file."""

from __future__ import annotations

from pathlib import Path

import yaml

from mutualrl.recipes import Request, resolve
from mutualrl.recipes.nesting import anchored
from mutualrl.recipes.schema import Recipe


def test_each_marked_key_is_anchored_and_no_other() -> None:
    value = {
        "pool": "p",
        "policies": [{"name": "a", "model": "m", "revision": "r", "trainer": {"output_dir": "o"}}, "no mapping"],
        "sources": [
            {"name": "x", "recorded": "f", "columns": {"text": "t"}},
            {"name": "y", "frozen": "g"},
            {"name": "z", "served": "http://h/v1", "model": "n"},
        ],
        "task": {
            "name": "mixture",
            "data": "d",
            "reward": ["r.py:f", "boxed"],
            "environment": "e.py:E",
            "tools": "t.py:t",
            "members": {"math": {"data": "i", "validation_data": "v"}, "arc": None},
        },
        "run": {"dir": "k"},
        "unknown": {"model": "u"},
    }
    found = anchored(value, (Recipe,), lambda mark, each: f"{'code' if mark.code else 'path'} {each}")
    assert found == {
        "pool": "p",
        "policies": [
            {"name": "a", "model": "path m", "revision": "r", "trainer": {"output_dir": "o"}},
            "no mapping",
        ],
        "sources": [
            {"name": "x", "recorded": "path f", "columns": {"text": "t"}},
            {"name": "y", "frozen": "path g"},
            {"name": "z", "served": "http://h/v1", "model": "n"},
        ],
        "task": {
            "name": "mixture",
            "data": "path d",
            "reward": ["code r.py:f", "code boxed"],
            "environment": "code e.py:E",
            "tools": "code t.py:t",
            "members": {"math": {"data": "path i", "validation_data": "path v"}, "arc": {}},
        },
        "run": {"dir": "k"},
        "unknown": {"model": "u"},
    }


def test_word_of_a_source_is_no_path_and_a_directory_of_that_name_is(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "rows.jsonl").write_text('{"prompt": "1+1:", "answer": "2"}\n')
    recipe = {
        "policies": [{"name": "ada", "model": "tiny:ada"}],
        "task": {"name": "dataset", "data": "task"},
        "sources": [{"name": "book", "recorded": "task"}],
        "regime": "sgt",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    resolved = resolve(Request(recipe=tmp_path / "recipe.yaml"))
    assert resolved.task.data == str(tmp_path / "task")
    assert [getattr(source, "recorded", None) for source in resolved.sources] == ["task"]
