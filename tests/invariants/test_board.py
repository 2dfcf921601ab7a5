"""The board: its page and picture come from the result files, and an entry of anybody's is checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import board
from conftest import REPOSITORY, Cli
from made_runs import made_run

PLAN: dict[str, Any] = {"task": "arithmetic", "steps": 20, "prompts_per_round": 8, "rollouts_per_prompt": 4}


def check(path: Path) -> list[board.Section]:
    """Check an entry as `python benchmarks/board.py --check` does."""
    return board.of_entry(board.read(path), path.stem)


def test_board_is_rebuilt_from_the_result_files_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "benchmarks" / "board.py", "--smoke", "--out", tmp_path]
    assert subprocess.run(command, capture_output=True).returncode == 0
    for name in ("board.md", "images/board.svg"):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / "docs" / name).read_bytes(), "python benchmarks/board.py"


def entry(cli_here: Cli, root: Path, seeds: int = 3, **changes: dict[str, Any]) -> Path:
    """Write what `mutualrl compare` says of runs of grpo and sgt; `changes`: of the fingerprint, by arm."""
    runs = []
    for arm, gain in (("grpo", 0.1), ("sgt", 0.3)):
        for seed in range(seeds if arm == "sgt" else 3):
            plan = {**PLAN, "data_sha256": f"d{seed}", "validation_sha256": "v", **changes.get(arm, {})}
            run = made_run(root / f"{arm}-{seed}", arm, seed=seed, gain=gain + 0.01 * seed, fingerprint=plan)
            runs.append(run)
    path = root / "mine.json"
    path.write_text(cli_here("compare", *runs, "--json").stdout)
    return path


def test_entry_with_the_same_data_and_seeds_is_taken(cli_here: Cli, tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "benchmarks" / "board.py", "--check", entry(cli_here, tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "sgt: +0.200 [" in checked.stdout
    assert checked.stdout.rstrip().endswith("helps")


@pytest.mark.parametrize(
    ("seeds", "changes", "message"),
    [
        (2, {}, "sgt has the seeds 0, 1, expected the same 3 or more as grpo (0, 1, 2)"),
        (3, {"sgt": {"data_sha256": "other"}}, "the arms of seed 0 have other prompts"),
    ],
)
def test_entry_that_is_not_comparable_is_refused(
    cli_here: Cli, tmp_path: Path, seeds: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        check(entry(cli_here, tmp_path, seeds, **changes))


def test_file_without_pieces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"differences": {}}))
    with pytest.raises(SystemExit, match="expected the output of: mutualrl compare RUNS --json"):
        check(tmp_path / "mine.json")


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry["pieces"].append(entry["pieces"][0]), "two runs of one seed"),
        (lambda entry: entry["pieces"][0]["policies"].pop("bob"), "other policies"),
        (lambda entry: entry.update(pieces=[p for p in entry["pieces"] if p["arm"] == "grpo"]), "grpo and another"),
        (lambda entry: entry.update(notes=["x: not matched: run.steps is 1 (a); 2 (b)"]), "differ in more"),
        (lambda entry: entry["pieces"][0].pop("policies"), "not what `mutualrl compare` prints"),
    ],
    ids=["twice", "policy", "alone", "settings", "shape"],
)
def test_entry_with_other_pieces_is_refused(
    cli_here: Cli, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        check(changed(entry(cli_here, tmp_path), change))


def test_fields_of_other_versions_do_not_matter(cli_here: Cli, tmp_path: Path) -> None:
    path = changed(entry(cli_here, tmp_path), lambda content: content["pieces"][0]["policies"]["ada"].update(later=1))
    assert [row.arm for section in check(path) for row in section.rows] == ["sgt"]
