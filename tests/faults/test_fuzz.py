"""A short run of `benchmarks/fuzz.py`: one schedule and four damages with a fixed seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

GOOD = {"as undisturbed", "as undamaged", "refused by name", "left out with a word"}


@pytest.mark.release
def test_random_kills_and_damage_are_survived_or_reported(tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "fuzz.py"
    if not script.is_file():
        pytest.skip("not in a source tree")
    command = [
        sys.executable,
        str(script),
        "--seed",
        "1",
        "--schedules",
        "1",
        "--damages",
        "4",
        "--of",
        "stopped",
        "--out",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "fuzz.json").exists(), result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads((tmp_path / "fuzz.json").read_text())
    cases = [case for kind in ("schedules", "damages") for case in report[kind].values()]
    bad = [case for case in cases if case["outcome"] not in GOOD]
    assert not bad
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert (len(report["schedules"]), len(report["damages"])) == (1, 4)
    outcomes = {case["outcome"] for case in cases}
    assert outcomes <= GOOD
    assert "| all | 1 | 1 | 0 |" in (tmp_path / "fuzz.md").read_text()
    assert "refused by name" in outcomes
