"""Stores of the exchange benchmark read back the rows they are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import exchange
import pictures


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
