"""The board: its page and picture come from the result files, and an entry of anybody's is checked."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import board
import sweep_results as sweeps
from conftest import REPOSITORY, Cli
from made_runs import made_run

PLAN: dict[str, Any] = {"task": "arithmetic", "steps": 20, "prompts_per_round": 8, "rollouts_per_prompt": 4}


def check(path: Path) -> list[board.Section]:
    """Check an entry as `python benchmarks/board.py --check` does."""
    return board.of_entry(board.read(path), path.stem)


def test_board_is_rebuilt_from_the_result_files_to_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "benchmarks" / "board.py", "--smoke", "--out", tmp_path]
    assert subprocess.run(command, capture_output=True).returncode == 0
    for name in ("board.md", "images/board.svg", "images/tokens.svg"):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / "docs" / name).read_bytes(), "python benchmarks/board.py"


@pytest.mark.slow
@pytest.mark.extended
def test_every_table_of_a_sweep_is_what_the_raw_values_give() -> None:
    command = [sys.executable, REPOSITORY / "benchmarks" / "rebuild.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "every file is what the raw values give"


def entry(cli_here: Cli, root: Path, seeds: int = 3, **changes: dict[str, Any]) -> Path:
    """Write what `mutualrl compare` says of runs of grpo and sgt; `changes`: of the fingerprint, by arm."""
    runs = []
    for arm, gain in (("grpo", 0.1), ("sgt", 0.3)):
        for seed in range(seeds if arm == "sgt" else 3):
            plan = {**PLAN, "data_sha256": f"d{seed}", "validation_sha256": "v", **changes.get(arm, {})}
            run = made_run(root / f"{arm}-{seed}", arm, seed=seed, gain=gain + 0.01 * seed, fingerprint=plan)
            runs.append(run)
    path = root / "mine.json"
    content = json.loads(cli_here("compare", *runs, "--json").stdout)
    content["entry"] = {"rule": "mine", "author": "me", "code": "https://example.org/mine"}
    path.write_text(json.dumps(content))
    return path


def test_entry_with_the_same_data_and_seeds_is_taken(cli_here: Cli, tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "benchmarks" / "board.py", "--check", entry(cli_here, tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "sgt: +0.200 [" in checked.stdout
    assert checked.stdout.rstrip().endswith("above")


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
        (lambda entry: entry["pieces"][0]["policies"]["ada"]["curve"].pop(), "other numbers of steps"),
        (lambda entry: entry["entry"].pop("author"), 'add to the file: "entry": {"author": "who hands it in"}'),
    ],
    ids=["twice", "policy", "alone", "settings", "shape", "steps", "author"],
)
def test_entry_with_other_pieces_is_refused(
    cli_here: Cli, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        check(changed(entry(cli_here, tmp_path), change))


def test_everything_that_an_entry_lacks_is_said_at_once(cli_here: Cli, tmp_path: Path) -> None:
    def change(entry: dict[str, Any]) -> None:
        del entry["entry"]["author"]
        entry["pieces"][0]["policies"]["ada"]["curve"].pop()
        entry.update(notes=["x: not matched: run.steps is 1 (a); 2 (b)"])

    with pytest.raises(SystemExit) as refused:
        check(changed(entry(cli_here, tmp_path), change))
    lines = str(refused.value).splitlines()
    assert [
        word in line for line, word in zip(lines, ("author", "numbers of steps", "differ in more"), strict=True)
    ] == [True] * 3


def test_the_steps_of_runs_are_said_beside_their_rows(cli_here: Cli, tmp_path: Path) -> None:
    (section,) = check(entry(cli_here, tmp_path))
    assert next(board.described([section])).endswith(f", {section.steps[0]} steps")


def first_commit(path: str, digest: str) -> str:
    """Return the time, in UTC, of the first commit in which a file has a sha256."""
    listed = git("log", "--follow", "--format=%H", "--", path).split()
    for commit in reversed(listed):
        content = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=REPOSITORY, capture_output=True)
        if content.returncode == 0 and hashlib.sha256(content.stdout).hexdigest() == digest:
            return committed(commit)
    raise AssertionError(f"{path}: no commit with {digest}")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def committed(commit: str) -> str:
    seconds = int(git("show", "-s", "--format=%ct", commit))
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no git repository, whose times are compared")
def test_claims_were_committed_when_the_board_says() -> None:
    """Every results file with claims is in the table, with the time of the claims' first commit."""
    registered = {}
    for path in sorted(sweeps.RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        found = content.get("comparison", {}).get("registered") if isinstance(content, dict) else None
        if found is not None:
            registered[path.stem] = first_commit(f"benchmarks/sweeps/{found['file']}", found["sha256"])
    assert registered == sweeps.COMMITTED


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no git repository, whose times are compared")
@pytest.mark.parametrize("name", sorted({name for pool in board.BOARD["pools"] for name in pool["results"]}))
def test_newer_than_the_claim_agrees_with_the_commits(name: str) -> None:
    """Results that were committed before their claims have no run that is newer, and a run that is called newer began
    after the first commit of its claims, up to the minute in which these were written and committed."""
    content = sweeps.stored(name)
    registered = content.get("comparison", {}).get("registered")
    if registered is None:
        pytest.skip("no claims")
    claimed = first_commit(f"benchmarks/sweeps/{registered['file']}", registered["sha256"])
    stored_in = content["code"].get("stored_in")
    outcomes = list(sweeps.outcomes_of(content).by.values())
    for outcome in outcomes:
        age = outcome.age(registered["changed"])
        if age == "newer":
            assert outcome.began >= claimed, (outcome.arm, outcome.seed)
        if stored_in is not None and committed(stored_in) < claimed:
            assert age == "older", (outcome.arm, outcome.seed)
    text = board.page([section for section in board.sections() if section.rows])
    assert ("not recorded" in text) and ("0 of 3" in text)


def test_rows_are_dated_by_the_last_claim_about_their_arm() -> None:
    """Three seeds were known when the claims about sgt, dynamic sampling and twice the rollouts were written, on two
    pools; no claim names a weight of .3."""
    by_title = {section.title: {row.arm: row.newer for row in section.rows} for section in board.sections()}
    for title in ("The same two beside rivals, 100 steps", "The same one beside rivals, 100 steps"):
        assert {by_title[title][arm] for arm in ("sgt", "resample", "grpo twice the rollouts")} == {"7 of 10"}
    assert by_title["Two models that know different things"]["sgt 0.3"] == "no claim"


def test_fields_of_other_versions_do_not_matter(cli_here: Cli, tmp_path: Path) -> None:
    path = changed(entry(cli_here, tmp_path), lambda content: content["pieces"][0]["policies"]["ada"].update(later=1))
    assert [row.arm for section in check(path) for row in section.rows] == ["sgt"]
