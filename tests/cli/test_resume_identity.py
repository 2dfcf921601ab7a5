"""Resuming requires the data, code, models and files that the run started with; changed ones are rejected by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import Cli

JUDGE = """
def score(completions, answer, **kwargs):
    raise OSError("the judge is down")
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Path]) -> Path:
    """Return a directory with data, a reward, two models, and a run over them that failed before its first step."""
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

    result = subprocess.run(
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
    assert "the judge is down" in result.stderr, result.stderr
    assert not (root / "r" / "summary.json").exists()
    return root


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
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
def test_changed_data_code_or_models_are_rejected_by_name(
    failed: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, message: str
) -> None:
    monkeypatch.chdir(failed)
    path = failed / name
    before = path.read_bytes()
    try:
        replace_text(path, old, new)
        result = cli_here("train", "--resume", "--run-dir", "r")
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert "restore the run's data" in result.stderr
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("recipe.yaml", "steps: 2", "steps: 9", "run.steps: 9, the run has 2"),
        ("recipe.yaml", "epsilon: 0.2", "epsilon: 0.3", "trainer.epsilon: 0.3, the run has 0.2"),
        ("recipe.yaml", "policies:", "policies", "recipe.yaml: changed since the run wrote it"),
        ("run.json", '"seed": 0', '"seed": 1', "run.json: its bytes do not match its checksum"),
        ("run.json", '"format": 1', '"format": 1e999', "run.json: not JSON"),
        ("supervisor/sessions.json", '"began"', '"begun"', "sessions.json: its bytes do not match its checksum"),
    ],
)
def test_changed_files_of_the_run_are_rejected_by_name(
    failed: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, message: str
) -> None:
    monkeypatch.chdir(failed)
    path = failed / "r" / name
    before = path.read_bytes()
    try:
        replace_text(path, old, new)
        result = cli_here("train", "--resume", "--run-dir", "r")
        assert result.returncode == 6, result.stderr
        assert message in result.stderr
        verified = cli_here("runs", "verify", "r", "--json")
        assert verified.returncode == 6
    finally:
        path.write_bytes(before)
    assert cli_here("runs", "verify", "r", "--json").returncode == 0


@pytest.mark.extended
def test_malformed_supervisor_file_does_not_prevent_a_resume(
    failed: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(failed)
    for number, text in enumerate(("{}", "[]", '{"session": 1}', '{"policies": {"ada": {"state": 3}}}')):
        (failed / "r" / "supervisor" / f"node-{number + 1}.json").write_text(text)
    result = cli_here("train", "--resume", "--run-dir", "r")
    assert result.returncode == 1, result.stderr  # the judge, as before
    assert "the judge is down" in result.stderr
