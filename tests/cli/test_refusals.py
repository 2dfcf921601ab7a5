"""What the start of a run refuses, a dry run refuses, too; files that users name are read without blocking."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from conftest import Cli

ROWS = [{"question": f"What is {i} plus 1?", "answer": str(i + 1), "deep": {"truth": str(i + 1)}} for i in range(64)]
TEMPLATE = "task.template={question}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


REFUSED = {
    "missing data": (("--data", "absent.jsonl"), 2, "data file not found"),
    "another field": (
        ("--data", "rows.jsonl"),
        2,
        "no field 'prompt' (found: answer, deep, question); if another field",
    ),
    "missing answer": (("--data", "rows.jsonl", "--set", TEMPLATE, "--set", "task.answer=x"), 2, "no field 'x'"),
    "too few rows": (("--data", "rows.jsonl", "--set", TEMPLATE, "--set", "round.prompts=320"), 2, "a round needs"),
    "long prompts": (
        ("--data", "rows.jsonl", "--set", TEMPLATE, "--set", "task.max_prompt_tokens=2"),
        2,
        "prompts is within task.max_prompt_tokens (2)",
    ),
    "directory": (("--data", "rows.jsonl", "--set", TEMPLATE, "--run-dir", "rows.jsonl/run"), 2, "is not a directory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dry_run_refuses_what_the_start_refuses(cli_here: Cli, rows: Path, name: str) -> None:
    arguments, code, message = REFUSED[name]
    command = ("train", "--regime", "grpo", "--pool", "tiny", "--task", "dataset", *arguments)
    for extra in (("--dry-run",), ("--dry-run", "--json")):
        result = cli_here(*command, *extra)
        assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert json.loads(result.stdout)["error"]["exit_code"] == code


def test_dry_run_accepts_nested_answers_and_templates_as_typed(cli_here: Cli, rows: Path) -> None:
    settings = ("--set", TEMPLATE, "--set", "task.answer=deep.truth", "--set", "round.prompts=32")
    result = cli_here("train", "--task", "dataset", "--data", rows, *settings, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["recipe"]["task"]["template"] == "{question}"


def test_compressed_and_tab_separated_rows_are_read(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(rows.read_bytes()))
    (tmp_path / "t.tsv").write_text("question\tanswer\n" + "".join(f"{r['question']}\t{r['answer']}\n" for r in ROWS))
    for name in ("z.jsonl.gz", "t.tsv"):
        shown = cli_here("tasks", "show", "dataset", "--data", name, "--template", "{question}", "--json")
        assert json.loads(shown.stdout)["n"] == 64, shown.stderr
    (tmp_path / "broken.jsonl.gz").write_bytes(b"not gzip")
    assert "cannot be read" in cli_here("tasks", "show", "dataset", "--data", "broken.jsonl.gz").stderr


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.tsv", "pipe.jsonl", "pipe.parquet", "pipe.jsonl.gz"])
def test_fifo_is_refused_without_waiting(cli_here: Cli, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    result = cli_here("tasks", "show", "dataset", "--data", name)
    assert (result.returncode, "is a FIFO, a device or a socket" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("name", ["all", "run.json", "latest.json", "con", "nul", "com1.x", "a."])
def test_names_that_collide_are_refused(cli_here: Cli, name: str) -> None:
    pool = f"policies=[{{name: '{name}', model: 'tiny:ada'}}, {{name: bob, model: 'tiny:bob'}}]"
    result = cli_here("train", "--set", pool, "--dry-run")
    assert (result.returncode, "choose another name" in result.stderr) == (2, True), result.stderr


def test_init_names_the_columns_of_the_data_and_takes_them(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    two = ("--model", "tiny:ada", "--model", "tiny:bob", "--max-completion-length", "20", "--yes")
    result = cli_here("init", "p", *two, "--data", rows)
    assert result.returncode == 2
    assert "no column 'prompt'; they have question, answer, deep: add --prompt-column question" in result.stderr
    result = cli_here("init", "p", *two, "--data", rows, "--prompt-column", "question")
    assert result.returncode == 0, result.stderr
    assert 'template: "{question}"' in (tmp_path / "p" / "pool.yaml").read_text()
    names: dict[str, object] = {}
    exec((tmp_path / "p" / "reward.py").read_text(), names)
    reward = names["reward"]
    assert reward(["it is 15", "5", "$1,234.0", "x"], answer=["5", "5", "1234", "7"]) == [0, 1, 1, 0]  # type: ignore[operator]
    assert reward(["so\nParis.", "Paris, not Rome"], answer=["paris", "Rome"]) == [1, 0]  # type: ignore[operator]


def test_json_command_without_its_object_fails(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import sys\nprint('loading')\nsys.exit(0)\ndef f(completions, **_): return []\n")
    settings = ("--task", "dataset", "--data", rows, "--set", TEMPLATE, "--set", "task.reward=r.py:f")
    result = cli_here("train", *settings, "--set", "round.prompts=32", "--dry-run", "--json")
    assert json.loads(result.stdout)["error"]["message"].endswith("called sys.exit(0)")
    assert result.returncode == 2
