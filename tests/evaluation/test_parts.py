"""Parts of an evaluation on disk that are moved, forged, truncated or damaged are rejected."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conftest import Cli
from mutualrl.evaluation.completion_store import SCHEMA
from mutualrl.storage.files import read_checksummed, write_checksummed

COMMAND = ("eval", "--pool", "tiny", "--limit", "12", "--max-new-tokens", "8", "--out", "o", "--json")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate two models, with one part each, and return the directory."""
    import subprocess
    import sys

    root = tmp_path_factory.mktemp("parts")
    result = subprocess.run([sys.executable, "-m", "mutualrl", *COMMAND], cwd=root, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    return root


def parts(out: Path, model: str) -> tuple[Path, Path]:
    (file,) = (out / "completions" / model).glob("*.parquet")
    return file, file.with_name(f"_{file.stem}.json")


def rewrite(out: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the rows of ada's part and update its marker to match."""
    file, marker = parts(out, "ada")
    rows = change(pq.read_table(file).to_pylist())
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")
    value = read_checksummed(marker)
    assert value is not None
    write_checksummed(marker, {**value, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()})


def swap(out: Path) -> None:
    ada, bob = parts(out, "ada"), parts(out, "bob")
    for a, b in zip(ada, bob, strict=True):
        content = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(content)


def forge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "reward": 1.0} for row in rows]


def flip_bit(out: Path) -> None:
    file, _ = parts(out, "ada")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap, "its model is 'bob', expected 'ada'"),
        (lambda out: rewrite(out, forge), "has reward 1.0, expected 0.0 for its text"),
        (lambda out: rewrite(out, lambda rows: rows[:-1]), "11 rows, expected 12"),
        (lambda out: rewrite(out, lambda rows: rows[::-1]), "row 0 is of prompt "),
        (flip_bit, "its checksum does not match its marker"),
        (lambda out: parts(out, "ada")[0].unlink(), "missing, but its marker exists"),
        (lambda out: parts(out, "ada")[1].write_text("{}"), "its bytes do not match its checksum"),
        (lambda out: shutil.copy(*parts(out, "ada")[::-1]), "its checksum does not match its marker"),
        (lambda out: (out / "request.json").write_text('{"format": 1}'), "its bytes do not match its checksum"),
    ],
)
def test_damaged_part_is_rejected_by_name(
    evaluated: Path, tmp_path: Path, cli_here: Cli, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(evaluated / "o", tmp_path / "o")
    damage(tmp_path / "o")
    result = cli_here(*COMMAND)
    assert (result.returncode, message in result.stderr) == (6, True), result.stderr
    assert json.loads(result.stdout)["error"]["kind"] == "damaged"


def test_part_without_a_marker_is_generated_again(evaluated: Path, tmp_path: Path, cli_here: Cli) -> None:
    shutil.copytree(evaluated / "o", tmp_path / "o")
    file, marker = parts(tmp_path / "o", "ada")
    before = pq.read_table(file)
    file.write_bytes(b"half")
    marker.unlink()
    (tmp_path / "o" / "completions" / "ada" / ".x.parquet.1.2.tmp").write_bytes(b"left by a killed writer")
    result = cli_here(*COMMAND)
    assert result.returncode == 0, result.stderr
    assert pq.read_table(file) == before
    assert not list((tmp_path / "o").rglob("*.tmp"))


def test_another_model_in_the_same_directory_is_another_evaluation(
    tmp_path: Path, tiny: dict[str, Path], cli_here: Cli
) -> None:
    """Models are compared by their bytes, not by name and times."""
    model = shutil.copytree(tiny["ada"], tmp_path / "m")
    command = ("eval", "--model", model, "--limit", "4", "--suite", "arithmetic", "--max-new-tokens", "4", "--out", "o")
    assert cli_here(*command).returncode == 0
    (file,) = model.glob("*.safetensors")
    (other,) = tiny["bob"].glob("*.safetensors")
    assert other.stat().st_size > 0
    config = model / "generation_config.json"
    config.write_text((config.read_text() if config.exists() else "{}") + " ")
    result = cli_here(*command)
    assert (result.returncode, "it differs in models" in result.stderr) == (2, True), result.stderr
    assert file.exists()
