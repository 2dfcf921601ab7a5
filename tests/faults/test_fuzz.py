"""A short form of `benchmarks/fuzz.py`: a few of its schedules and damages, by their numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

GOOD = {"as undisturbed", "as undamaged", "refused by name", "left out with a word"}


@pytest.mark.extended
def test_random_kills_and_damages_are_survived_or_named(tmp_path: Path) -> None:
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "fuzz.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "fuzz.json").read_text())
    bad = [each for kind in ("schedules", "damages") for each in result[kind].values() if each["outcome"] not in GOOD]
    assert not bad
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (len(result["schedules"]), len(result["damages"])) == (1, 4)
    outcomes = {each["outcome"] for kind in ("schedules", "damages") for each in result[kind].values()}
    assert outcomes <= GOOD
    assert "| all | 1 | 1 | 0 |" in (tmp_path / "fuzz.md").read_text()
    assert "refused by name" in outcomes
