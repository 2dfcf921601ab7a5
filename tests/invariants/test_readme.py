"""README is one page, its tables are the measured ones, and commands on the pages exist."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conftest import PATIENCE, REPOSITORY

README = (REPOSITORY / "README.md").read_text()
MEASURED = (REPOSITORY / "docs" / "results.md").read_text()
DOCS = {path: path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md"))}
PAGES = {REPOSITORY / "README.md": README, REPOSITORY / "SKILL.md": (REPOSITORY / "SKILL.md").read_text(), **DOCS}
NOTES = {path: path.read_text() for path in (*(REPOSITORY / "design").glob("*.md"), *DOCS)}
PYTHON_NAME = re.compile(r"`(mutualrl(?:\.\w+)+)")
RESULTS = sorted((REPOSITORY / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_measured_table_is_on_a_page_with_its_script(path: Path) -> None:
    table = path.read_text().strip()
    pages = [page for page in (README, *NOTES.values()) if table in page]
    assert pages
    command = json.loads(path.with_suffix(".json").read_text())["command"]
    script = re.fullmatch(r"python benchmarks/(\w+)\.py( --\w+( \w+)?)?", command)
    assert script is not None
    assert path.stem.startswith(script[1])  # the script, or a part of its results
    assert all(command in page for page in pages)


@pytest.mark.release
def test_readme_is_one_page() -> None:
    words = len(README.split())
    tables = re.findall(r"(?m)^\|[ -]*-{3}", README)
    images = re.findall(r"<picture>|!\[", README)
    assert words <= 800, words
    assert len(tables) <= 2
    assert len(images) == 2  # a rescue, and the board


def test_drift_table_is_the_measured_one() -> None:
    rows = [line for line in MEASURED.splitlines() if line.startswith("| ") and "→" in line]
    assert len(rows) == 5
    assert "\n".join(rows) in (REPOSITORY / "benchmarks" / "results" / "thl.md").read_text()


def test_files_and_links_in_the_readme_exist() -> None:
    names = set(re.findall(r"\]\(([\w./-]+)\)", README)) | set(re.findall(r"benchmarks/[\w./]+\w", README))
    assert len(names) > 5
    assert all((REPOSITORY / name).exists() for name in names)


def test_first_screen_has_the_two_commands() -> None:
    first = "\n".join(README.splitlines()[:30])
    assert "pip install . && mutualrl train --regime sgt --pool tiny" in first
    assert "pip install '.[test]' && pytest" in first


def test_subcommands_in_the_readme_exist() -> None:
    from typer.main import get_command

    from mutualrl.cli.app import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"(?m)(?:`|^|&& )mutualrl ([a-z-]+)", README)) <= known


def test_diagnostics_tables_consist_of_measured_lines() -> None:
    known = {line for path in RESULTS for line in path.read_text().splitlines()}
    known |= {f"{line}" for path in RESULTS for line in path.read_text().split("\n\n")}
    section = MEASURED.split("## Diagnostics of the tiny pool")[1].split("## Evaluation")[0]
    rows = [line for line in section.splitlines() if line.startswith(("| ", "**", "Recommendation"))]
    assert len(rows) > 8
    assert all(row in known for row in rows)


def test_eval_adds_at_most_a_fifth_to_bare_generation() -> None:
    result = json.loads((REPOSITORY / "benchmarks" / "results" / "evaluation.json").read_text())["generation"]
    assert {row["engine"] for row in result} == {"transformers", "vllm"}
    assert all(row["ratio"] <= 1.2 for row in result)


@pytest.mark.parametrize("path", list(PAGES), ids=lambda path: path.name)
def test_scripts_results_and_links_on_a_page_exist(path: Path) -> None:
    links = set(re.findall(r"\]\(([^)#:]+)\)", PAGES[path]))
    assert all((path.parent / name).exists() for name in links), links
    for name in re.findall(r"\b((?:benchmarks|tests|design|docs|recipes)/[\w./-]+\w)", PAGES[path]):
        assert (REPOSITORY / name).exists(), name


@pytest.mark.parametrize("path", list(PAGES), ids=lambda path: path.name)
def test_commands_and_flags_on_a_page_exist(path: Path) -> None:
    from typer.main import get_command

    from mutualrl.cli.app import app
    from mutualrl.cli.command import LazyCommand
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
                    command = command.load() if isinstance(command, LazyCommand) else command
                elif word.startswith("--"):
                    assert word.partition("=")[0] in {
                        o for p in command.params for o in (*p.opts, *p.secondary_opts)
                    }, line
    for name in re.findall(r"paper/[a-z0-9][\w.-]*\w", PAGES[path]):
        assert name in recipes, name


def test_every_public_command_is_documented() -> None:
    from typer.main import get_command

    from mutualrl.cli.app import app

    text = "\n".join([README, *NOTES.values()])
    public = [name for name, command in get_command(app).commands.items() if not command.hidden]  # type: ignore[attr-defined]
    assert not [name for name in public if f"mutualrl {name}" not in text]


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra `docs` is not installed")
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "DISABLE_MKDOCS_2_WARNING": "true", "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    reference = (site / "docs" / "api.html").read_text()
    for name in ("MutualGRPOTrainer", "ExtraRow", "ExchangeStore", "align_logprobs", "WaitTimeouts"):
        assert name in reference


def test_python_names_on_pages_exist() -> None:
    pages = [path.read_text() for path in (REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "SECURITY.md")]
    names = {name for page in (*PAGES.values(), *NOTES.values(), *pages) for name in PYTHON_NAME.findall(page)}
    assert {"mutualrl.see", "mutualrl.study.claims.evaluate_claims"} & names
    assert [name for name in sorted(names) if not exists(name)] == []


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or a name in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value is not None
    return False
