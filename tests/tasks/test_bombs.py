"""Parquet files of a few kilobytes that stand for more than a machine's memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mutualrl.errors import DataError
from mutualrl.storage import parquet
from mutualrl.tasks.rows import read_rows


def bomb(path: Path) -> Path:
    """Write 200 MB of text as some kilobytes: one value, by its number in a dictionary."""
    text = pa.array(["x" * 100_000] * 2_000)
    table = pa.table({"prompt": text, "answer": pa.array(["1"] * 2_000)})
    pq.write_table(table, path, compression="zstd", use_dictionary=True)
    assert path.stat().st_size < 100_000
    return path


def test_what_decodes_to_more_than_the_limit_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bomb(tmp_path / "rows.parquet")
    assert len(parquet.read_table(file)) == 2_000
    with pytest.raises(DataError, match=r"rows\.parquet: over 10,000,000 bytes when decoded"):
        parquet.read_table(file, limit=10_000_000)
    monkeypatch.setattr(parquet, "LARGEST", 10_000_000)
    monkeypatch.setattr(parquet.read_table, "__defaults__", (10_000_000,))
    with pytest.raises(DataError, match=r"rows\.parquet: over 10,000,000 bytes when decoded"):
        next(read_rows(file))


def test_pages_that_say_themselves_that_they_are_too_large_are_not_decoded(tmp_path: Path) -> None:
    file = tmp_path / "pages.parquet"
    table = pa.table({"x": pa.array(["y" * 1_000_000 + str(n) for n in range(30)])})
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    assert file.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"3\d,\d+,\d+ bytes when decompressed, expected at most 1,000,000"):
        parquet.read_table(file, limit=1_000_000)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match="not a regular file"):
        parquet.read_table(tmp_path / "pipe.parquet")
