"""`mutualrl` without arguments: the commands that it prints run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import Cli
from mutualrl.cli.app import FIRST

COMMANDS = [re.split(r"\s{3,}", line.strip())[0] for line in FIRST.splitlines() if line.startswith("  mutualrl ")]
NAMES = {"DUMP": "dump.jsonl", "MODEL": "tiny:ada", "ONE": "tiny:ada", "TWO": "tiny:bob", "ROWS": "rows.jsonl"}
NAMES |= {"book=recorded:FILE": "book=recorded:book.jsonl", "DIRECTORY": "mine"}


def test_first_screen_is_printed_without_arguments(cli_here: Cli) -> None:
    result = cli_here()
    assert (result.returncode, result.stdout.strip()) == (0, FIRST)
    assert len(FIRST.splitlines()) < 24
    assert max(map(len, FIRST.splitlines())) <= 120
    assert cli_here("--help").stdout.count("╭") == 2  # options and commands, as before


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(command: str, cli_here: Cli, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+{b}:", "answer": a + b} for a in range(1, 9) for b in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"prompt": row["prompt"], "solution": f"\\boxed{{{row['answer']}}}"} for row in rows]
    (tmp_path / "book.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    dump = [{"prompt": row["prompt"], "reward": 0.0} for row in rows]
    (tmp_path / "dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dump))
    arguments = [NAMES.get(word, word) for word in shlex.split(command)][1:]
    if arguments[0] == "train":
        arguments.append("--dry-run")
    if arguments[0] == "complementarity" and "--model" in arguments:
        arguments += ["--prompts", "4", "--samples", "2", "--max-new-tokens", "16"]  # tiny models have 64 tokens
    if arguments[0] == "init":
        arguments += ["--model", "tiny:ada", "--model", "tiny:bob", "--data", "rows.jsonl", "--yes"]
    result = cli_here(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr
