"""What README says is what was measured, and what it tells people to type exists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
DOCS = {path: path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md"))}
PAGES = {REPOSITORY / "README.md": README, **DOCS}
NOTES = {path: path.read_text() for path in (*(REPOSITORY / "design").glob("*.md"), *DOCS)}
RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_measured_table_stands_in_readme_or_a_note_beside_its_script(path: Path) -> None:
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


def prose(page: str) -> list[str]:
    """The paragraphs of a page: no code, no table, no heading."""
    blocks = re.sub(r"```.*?```", "", page, flags=re.DOTALL).split("\n\n")
    return [block for block in blocks if block.strip() and not block.lstrip().startswith(("|", "#", "**"))]


def figures_in(text: str) -> set[str]:
    """Measured figures: decimals below 1 of two digits or more, factors (`1.4x`), and per cents with a decimal."""
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return set(re.findall(r"(?<![\w.,])0\.\d{2,}(?![\w.]|x\b)", plain)) | set(re.findall(r"(?<![\w.])\d+\.\d+x", plain))


@pytest.mark.parametrize("path", list(PAGES), ids=lambda path: path.name)
def test_every_claim_names_its_script_and_its_figures_are_in_its_results(path: Path) -> None:
    for block in prose(PAGES[path]):
        scripts = set(re.findall(r"python benchmarks/(\w+)\.py", block))
        found = figures_in(block)
        if not found:
            continue
        assert scripts, f"{path.name}: no script is named beside {sorted(found)}: {block[:200]}"
        results = [
            REPOSITORY / "benchmarks" / "results" / f"{script}.{kind}" for script in scripts for kind in ("md", "json")
        ]
        known = "".join(result.read_text() for result in results)
        unknown = {figure for figure in found if figure not in known}
        assert not unknown, f"{path.name}: {sorted(unknown)} are not in the results of {sorted(scripts)}"


@pytest.mark.parametrize("path", list(PAGES), ids=lambda path: path.name)
def test_scripts_results_and_links_that_a_page_names_exist(path: Path) -> None:
    named = set(re.findall(r"\]\(([^)#:]+)\)", PAGES[path]))
    assert all((path.parent / name).exists() for name in named), named
    for name in re.findall(r"\b((?:benchmarks|tests|design|docs|recipes)/[\w./-]+\w)", PAGES[path]):
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("path", list(PAGES), ids=lambda path: path.name)
def test_commands_and_flags_that_a_page_shows_exist(path: Path) -> None:
    from typer.main import get_command

    from mutualrl.cli.app import app
    from mutualrl.recipes import shipped

    recipes = {f"paper/{name}" for kind, name, _ in shipped() if kind == "paper"}
    fenced = re.findall(r"```(?:bash)?\n(.*?)```", PAGES[path], flags=re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"`(mutualrl [^`]*)`", PAGES[path])
    for line in lines:
        for part in re.split(r"\s+#\s|&&|;", line.removeprefix("$ ")):
            words = shlex.split(part.replace("`", ""), comments=True) if part.strip().startswith("mutualrl ") else []
            command: Any = get_command(app)
            for word in words[1:]:
                if word in getattr(command, "commands", {}):
                    command = command.commands[word]
                elif word.startswith("--"):
                    assert word.partition("=")[0] in {
                        o for p in command.params for o in (*p.opts, *p.secondary_opts)
                    }, line
    for name in re.findall(r"paper/[a-z0-9][\w.-]*\w", PAGES[path]):
        assert name in recipes, name


def test_every_public_command_is_told_of_somewhere() -> None:
    from typer.main import get_command

    from mutualrl.cli.app import app

    everything = "\n".join([README, *NOTES.values()])
    assert not [name for name in get_command(app).commands if f"mutualrl {name}" not in everything]  # type: ignore[attr-defined]
