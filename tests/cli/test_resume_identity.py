"""A resumed run is the run that began: its data, code, models and files are what they were, or it says what is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli

JUDGE = """
def score(completions, answer, **kwargs):
    raise OSError("the judge is down")
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Path]) -> Path:
    """Return a directory with data, a reward, two models, and a run over them that ended before its first step."""
    root = tmp_path_factory.mktemp("identity")
    rows = [{"prompt": f"{a}+{b}:", "answer": str(a + b), "level": a} for a in range(6) for b in range(6)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    (root / "judge.py").write_text(JUDGE)
    for name in ("ada", "bob"):
        shutil.copytree(tiny[name], root / name)
    policies = [{"name": name, "model": str(root / name)} for name in ("ada", "bob")]
    (root / "pool.yaml").write_text(json.dumps({"policies": policies}))
    import subprocess
    import sys

    done = subprocess.run(
        [
            *(sys.executable, "-m", "mutualrl", "train", "--pool", "pool.yaml", "--task", "dataset", "--run-dir", "r"),
            *("--data", "rows.jsonl", "--set", "task.validation_data=held-out.jsonl", "--steps", "2"),
            *("--set", "task.reward=judge.py:score", "--set", "trainer.max_completion_length=8"),
            *("--set", "run.max_restarts=0", "--set", "run.validate_every=0"),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the judge is down" in done.stderr, done.stderr
    assert not (root / "r" / "summary.json").exists()
    return root


def replaced(path: Path, old: str, new: str) -> Callable[[], None]:
    """Return what changes a file."""

    def change() -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("rows.jsonl", '"answer": "7"', '"answer": "0"', "data_sha256"),
        ("rows.jsonl", '"level": 3', '"level": 4', "data_sha256"),
        ("held-out.jsonl", '"answer": "5"', '"answer": "0"', "validation_sha256"),
        ("judge.py", "is down", "is dead", "reward "),
        (
            "ada/config.json",
            '"max_position_embeddings"',
            '"max_position_embeddingz"',
            "policy 'ada': the files of its base",
        ),
    ],
)
def test_changed_data_code_or_models_are_refused_by_name(
    failed: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, words: str
) -> None:
    monkeypatch.chdir(failed)
    path = failed / name
    before = path.read_bytes()
    try:
        replaced(path, old, new)()
        done = cli_here("train", "--resume", "--run-dir", "r")
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert "restore the run's data" in done.stderr
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("recipe.yaml", "steps: 2", "steps: 9", "run.steps: 9, the run has 2"),
        ("recipe.yaml", "epsilon: 0.2", "epsilon: 0.3", "trainer.epsilon: 0.3, the run has 0.2"),
        ("recipe.yaml", "policies:", "policies", "recipe.yaml: changed since the run wrote it"),
        ("run.json", '"seed": 0', '"seed": 1', "run.json: its bytes do not match its checksum"),
        ("run.json", '"format": 3', '"format": 3e999', "run.json: not JSON"),
        ("supervisor/sessions.json", '"began"', '"begun"', "sessions.json: its bytes do not match its checksum"),
    ],
)
def test_changed_files_of_the_run_are_refused_by_name(
    failed: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, words: str
) -> None:
    monkeypatch.chdir(failed)
    path = failed / "r" / name
    before = path.read_bytes()
    try:
        replaced(path, old, new)()
        done = cli_here("train", "--resume", "--run-dir", "r")
        assert done.returncode == 6, done.stderr
        assert words in done.stderr
        verified = cli_here("runs", "verify", "r", "--json")
        assert verified.returncode == 6
    finally:
        path.write_bytes(before)
    assert cli_here("runs", "verify", "r", "--json").returncode == 0


@pytest.mark.extended
def test_a_supervisors_file_of_another_shape_is_no_obstacle(
    failed: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(failed)
    for number, text in enumerate(("{}", "[]", '{"session": 1}', '{"policies": {"ada": {"state": 3}}}')):
        (failed / "r" / "supervisor" / f"node-{number + 1}.json").write_text(text)
    done = cli_here("train", "--resume", "--run-dir", "r")
    assert done.returncode == 1, done.stderr  # the judge, as before
    assert "the judge is down" in done.stderr
