"""What README says is what was measured, and what it tells people to type exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
NOTES = {path.name: path.read_text() for path in (REPOSITORY / "design").glob("*.md")}
RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_measured_table_stands_in_readme_or_a_design_note_beside_its_script(path: Path) -> None:
    table = path.read_text().strip()
    pages = [page for page in (README, *NOTES.values()) if table in page]
    assert pages
    assert all(f"python benchmarks/{path.stem}.py" in page for page in pages)
    assert json.loads(path.with_suffix(".json").read_text())["command"] == f"python benchmarks/{path.stem}.py"


def test_the_table_of_drift_in_the_readme_is_the_measured_one() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| ") and "→" in line]
    assert len(rows) == 5
    assert "\n".join(rows) in (REPOSITORY / "benchmarks" / "results" / "thl.md").read_text()


def test_files_and_links_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"\]\(([\w./-]+)\)", README)) | set(re.findall(r"benchmarks/[\w./]+\w", README))
    assert len(named) > 5
    assert all((REPOSITORY / name).exists() for name in named)


def test_the_first_screen_has_the_two_commands() -> None:
    first = "\n".join(README.splitlines()[:20])
    assert "pip install . && mutualrl train --regime sgt --pool tiny" in first
    assert "pip install '.[test]' && pytest" in first


def test_subcommands_of_the_readme_exist() -> None:
    from typer.main import get_command

    from mutualrl.cli.app import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"`?mutualrl ([a-z-]+)", README)) - {"trains"} <= known
