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


def test_the_tables_of_the_readme_are_lines_of_measured_ones() -> None:
    known = {line for path in RESULTS for line in path.read_text().splitlines()}
    known |= {f"{line}" for path in RESULTS for line in path.read_text().split("\n\n")}
    section = README.split("## Will these models help each other?")[1].split("## Can these two models")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| ", "**", "Recommendation"))]
    assert len(rows) > 12
    assert all(row in known for row in rows)


def test_the_time_and_memory_of_the_diagnostics_are_the_measured_ones() -> None:
    found = json.loads((REPOSITORY / "benchmarks" / "results" / "evaluation.json").read_text())["diagnostics"]
    ours = [row for row in found if "pandas" not in row["what"]]
    seconds, most = sorted(row["seconds"] for row in ours), max(row["gigabytes"] for row in ours)
    said = f"100,000 records in {seconds[0]:.1f} to {seconds[-1]:.1f} s and at most {most:.2f} GB"
    assert said in README
    assert seconds[-1] < 10
    assert most < 1


def test_what_eval_adds_is_what_the_readme_says() -> None:
    found = json.loads((REPOSITORY / "benchmarks" / "results" / "evaluation.json").read_text())["generation"]
    assert {row["engine"] for row in found} == {"transformers", "vllm"}
    assert all(row["ratio"] <= 1.2 for row in found)
