"""The commit of the code that begins a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mutualrl.storage.rundir import checkout
from mutualrl.study.outcomes import Outcome, Outcomes


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout.strip()


def test_commit_and_changes_of_tracked_files(tmp_path: Path) -> None:
    package, results = tmp_path / "src" / "package", tmp_path / "benchmarks" / "results"
    for directory in (package, results):
        directory.mkdir(parents=True)
    file = package / "code.py"
    file.write_text("one\n")
    (results / "a.json").write_text("{}")
    assert checkout(file) is None  # no repository
    git(tmp_path, "init", "-q")
    assert checkout(file) is None  # not tracked: a package that is installed inside a user's repository
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "new.txt").write_text("untracked")
    (results / "a.json").write_text("{1}")
    assert checkout(file) == head  # results are not code
    file.write_text("two\n")
    assert checkout(file) == f"{head}+changed"
    assert checkout(tmp_path / "nowhere" / "code.py") is None


def test_code_of_several_runs_is_in_the_order_of_their_beginnings() -> None:
    def outcome(seed: int, began: str, checkout: str = "", version: str = "") -> Outcome:
        return Outcome("p", "a", seed, {}, began, version=version, checkout=checkout)

    one, two = outcome(0, "2026-02", "b" * 40 + "+changed"), outcome(1, "2026-01", "a" * 40, "0.1.0")
    old, oldest = outcome(2, "2025-02", version="0.1.0"), outcome(3, "")
    assert Outcomes([one]).code == "bbbbbbbb with changes"
    assert Outcomes([one, two]).code == "aaaaaaaa (1 of 2), bbbbbbbb with changes (1 of 2)"
    assert Outcomes([old, oldest]).code == "not recorded (1 of 2), mutualrl 0.1.0 (1 of 2)"
    for each in (one, two, old, oldest):
        assert Outcome.from_json(each.to_json()) == each  # type: ignore[arg-type]
