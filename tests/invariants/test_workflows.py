"""Workflow files of the forge: what they name exists here, and no job may write more than it needs."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from conftest import LANES, REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def content(name: str) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((REPOSITORY / ".github" / "workflows" / f"{name}.yml").read_text())
    return value


def commands(workflow: dict[str, Any]) -> str:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_names_what_exists(path: Any) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    workflow = content(path.stem)
    text = commands(workflow)
    extras = re.findall(r"'\.\[(\w+)\]'", text)
    assert set(extras) <= set(project["optional-dependencies"])
    torch = re.findall(r"torch==([\d.]+)", text)
    assert all(f"torch=={version}\n" in (REPOSITORY / "constraints.txt").read_text() for version in torch)
    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


def test_tests_of_the_forge_are_those_of_the_project() -> None:
    workflow = content("ci")
    script = (REPOSITORY / ".ci" / "run").read_text()
    command = 'pytest -n 3 -m "not release'
    assert f'{command}" --durations=20' in commands(workflow)
    assert f'{command}$skipped" --durations=20' in script
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]


def test_lanes_are_those_of_the_script_and_name_what_exists() -> None:
    lanes = json.loads((REPOSITORY / ".ci" / "lanes.json").read_text())
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert lanes.keys() == {*LANES, "vllm"}
    assert f"for lane in {' '.join(LANES)}; do" in script
    named = [
        *(name for modules in LANES.values() for name in modules),
        *(n for lane in lanes.values() for n in lane["reads"]),
    ]
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_lane_of_thl_reads_what_its_tests_import() -> None:
    reads = json.loads((REPOSITORY / ".ci" / "lanes.json").read_text())["thl"]["reads"]
    names = set()
    for path in (*REPOSITORY.glob("tests/thl/*.py"), *REPOSITORY.glob("src/mutualrl/thl/*.py")):
        names.update(re.findall(r"^\s*(?:from|import) mutualrl\.(\w+)", path.read_text(), re.MULTILINE))
    names -= {"errors", "storage"}  # what every room stands on
    assert [name for name in sorted(names) if f"src/mutualrl/{name}" not in reads] == []


def test_release_refuses_a_tag_that_is_not_the_version_or_has_no_date() -> None:
    check = commands(content("release"))
    assert 'test "v$version" = "$GITHUB_REF_NAME"' in check
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version} (unreleased)" in (REPOSITORY / "CHANGELOG.md").read_text()  # so that its grep fails today
