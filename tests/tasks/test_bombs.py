"""Small Parquet files that decode to more than the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mutualrl.errors import DataError
from mutualrl.storage import parquet
from mutualrl.tasks.rows import read_rows


def bomb(path: Path) -> Path:
    """Write 200 MB of text in a few kilobytes: one dictionary-encoded value."""
    text = pa.array(["x" * 100_000] * 2_000)
    table = pa.table({"prompt": text, "answer": pa.array(["1"] * 2_000)})
    pq.write_table(table, path, compression="zstd", use_dictionary=True)
    assert path.stat().st_size < 100_000
    return path


def test_file_that_decodes_beyond_the_limit_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bomb(tmp_path / "rows.parquet")
    assert len(parquet.read_table(file)) == 2_000
    with pytest.raises(DataError, match=r"rows\.parquet: over 10,000,000 bytes when decoded"):
        parquet.read_table(file, limit=10_000_000)
    monkeypatch.setattr(parquet, "LARGEST", 10_000_000)
    with pytest.raises(DataError, match=r"rows\.parquet: over 10,000,000 bytes when decoded"):
        list(read_rows(file))


def test_pages_with_a_declared_size_beyond_the_limit_are_not_decoded(tmp_path: Path) -> None:
    file = tmp_path / "pages.parquet"
    table = pa.table({"x": pa.array(["y" * 1_000_000 + str(n) for n in range(30)])})
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    assert file.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"3\d,\d+,\d+ bytes when decompressed, expected at most 1,000,000"):
        parquet.read_table(file, limit=1_000_000)


def test_pipe_is_rejected_without_blocking(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match="not a regular file"):
        parquet.read_table(tmp_path / "pipe.parquet")
