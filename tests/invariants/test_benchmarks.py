"""Stores of the exchange benchmark read back the rows they are given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import exchange
import pictures
from conftest import PATIENCE, REPOSITORY


@pytest.mark.parametrize("name", ["mutualrl", "pickle file", "SQLite (WAL, full)"])
def test_benchmark_store_reads_back_a_round(tmp_path: Path, name: str) -> None:
    store = exchange.STORES[name](tmp_path)
    rows = exchange.records(2, 2, 5, 0)
    store.publish(0, rows)
    stored = store.read(0)
    assert len(rows) == 4
    assert (store.size() or 0) > 0
    if name == "mutualrl":
        assert stored.column("y_text").to_pylist() == [row.text for row in rows]
        assert stored.column("token_ids").to_pylist() == [list(row.token_ids or ()) for row in rows]
    elif name == "pickle file":
        assert stored["text"] == [row.text for row in rows]
    else:
        assert [row[5] for row in stored] == [row.text for row in rows]


def test_picture_of_a_rescue_is_of_the_present_page() -> None:
    described = json.loads((pictures.IMAGES / "rescue.json").read_text())
    assert described["sources"] == pictures.sources(), "stale: python benchmarks/pictures.py"
    assert "Next visit" in described["text"]


@pytest.mark.extended
@pytest.mark.slow
def test_our_grpo_is_plain_trl_in_the_benchmark_that_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/fidelity.py", "--steps", "2", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr[-2000:]
    for policy in json.loads((tmp_path / "fidelity.json").read_text())["policies"].values():
        assert policy["steps"] == 2
        assert set(policy["largest_difference"].values()) == {0.0}
