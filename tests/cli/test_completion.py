"""Shell completion of names and keys, not only of flags."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import HEAVY, imported

SCRIPT = Path(sys.executable).with_name("mutualrl")  # completion depends on the command's name


def complete(line: str, directory: Path, *python: str) -> subprocess.CompletedProcess[str]:
    """Request completions of the last word of a command line, as bash does."""
    words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
    variables = {"_MUTUALRL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, *python, str(SCRIPT)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, cwd=directory)


def completions(line: str, directory: Path) -> list[str]:
    """Return the suggested completions."""
    return complete(line, directory).stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mutualrl train --regime gu", ["guided"]),
        ("mutualrl train --pool tiny-t", ["tiny-three", "tiny-tools"]),
        ("mutualrl train --task boo", ["boolq"]),
        ("mutualrl train --set trainer.learning_r", ["trainer.learning_rate="]),
        ("mutualrl train --set exchange.st", ["exchange.staleness="]),
        (
            "mutualrl train paper/2qwen-x",
            ["paper/2qwen-xgrpo-shuffled", "paper/2qwen-xgrpo-whitened", "paper/2qwen-xgrpo"],
        ),
        ("mutualrl recipes cp kubernetes/", ["kubernetes/join"]),
        ("mutualrl regimes show hac", ["hacpo"]),
        ("mutualrl join URL --pool tiny-three --policy ", ["ada", "bob", "cyd"]),
        ("mutualrl join URL --pool none --policy ", []),
    ],
)
def test_names_and_keys_are_completed(tmp_path: Path, line: str, expected: list[str]) -> None:
    assert sorted(completions(line, tmp_path)) == sorted(expected)


def test_run_directories_and_user_files_are_completed(tmp_path: Path) -> None:
    for name in ("runs/one", "runs/two", "elsewhere/three", "runs/no-run"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/one", "runs/two", "elsewhere/three"):
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("")
    assert completions("mutualrl runs verify ", tmp_path) == ["runs/one", "runs/two"]
    assert completions("mutualrl exchange ls elsewhere/t", tmp_path) == ["elsewhere/three"]
    assert completions(f"mutualrl eval --run {tmp_path}/runs/o", tmp_path) == [f"{tmp_path}/runs/one"]
    assert completions("mutualrl train --pool mi", tmp_path) == ["mine.yaml"]
    assert "elsewhere/" in completions("mutualrl train el", tmp_path)


def test_completion_runs_no_user_code_and_prints_no_errors(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text("open('ran', 'w')\nSPEC = None\n")
    policies = [{"name": "one", "model": "tiny:ada"}, {"name": "two", "model": "tiny:bob"}]
    recipe = {"policies": policies, "regime": {"name": "rule.py:SPEC"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert completions("mutualrl join URL --recipe recipe.yaml --policy ", tmp_path) == ["one", "two"]
    assert not (tmp_path / "ran").exists()
    for line in ("mutualrl report **x", "mutualrl runs verify /proc/1/root/", "mutualrl train /nowhere/at/all/"):
        result = complete(line, tmp_path)
        assert (result.stdout.split(), result.stderr) == ([], "")


def test_completion_does_not_import_torch(tmp_path: Path) -> None:
    result = complete("mutualrl train --regime s", tmp_path, "-X", "importtime")
    assert result.stdout.split() == ["sgt", "swarm"]
    assert not imported(result.stderr) & HEAVY
