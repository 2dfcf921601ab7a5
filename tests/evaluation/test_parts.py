"""Parts of an evaluation on disk: moved, forged, cut or damaged, none is believed."""

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
    """Return a directory with an evaluation of two models, of one part each."""
    import subprocess
    import sys

    root = tmp_path_factory.mktemp("parts")
    done = subprocess.run([sys.executable, "-m", "mutualrl", *COMMAND], cwd=root, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def parts(out: Path, model: str) -> tuple[Path, Path]:
    (file,) = (out / "completions" / model).glob("*.parquet")
    return file, file.with_name(f"_{file.stem}.json")


def rewritten(out: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Change the rows of ada's part, and make its marker match the new bytes."""
    file, marker = parts(out, "ada")
    rows = change(pq.read_table(file).to_pylist())
    import pyarrow as pa

    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file, compression="zstd")
    value = read_checksummed(marker)
    assert value is not None
    write_checksummed(marker, {**value, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()})


def swapped(out: Path) -> None:
    ada, bob = parts(out, "ada"), parts(out, "bob")
    for a, b in zip(ada, bob, strict=True):
        kept = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(kept)


def forged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "reward": 1.0} for row in rows]


def bit_flipped(out: Path) -> None:
    file, _ = parts(out, "ada")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (swapped, "its model is 'bob', expected 'ada'"),
        (lambda out: rewritten(out, forged), "has reward 1.0, expected 0.0 for its text"),
        (lambda out: rewritten(out, lambda rows: rows[:-1]), "11 rows, expected 12"),
        (lambda out: rewritten(out, lambda rows: rows[::-1]), "row 0 is of prompt "),
        (bit_flipped, "its checksum does not match its marker"),
        (lambda out: parts(out, "ada")[0].unlink(), "missing, but its marker exists"),
        (lambda out: parts(out, "ada")[1].write_text("{}"), "its bytes do not match its checksum"),
        (lambda out: shutil.copy(*parts(out, "ada")[::-1]), "its checksum does not match its marker"),
        (lambda out: (out / "request.json").write_text('{"format": 2}'), "its bytes do not match its checksum"),
    ],
)
def test_a_part_that_is_not_what_was_written_is_named(
    evaluated: Path, tmp_path: Path, cli_here: Cli, harm: Callable[[Path], object], words: str
) -> None:
    shutil.copytree(evaluated / "o", tmp_path / "o")
    harm(tmp_path / "o")
    done = cli_here(*COMMAND)
    assert (done.returncode, words in done.stderr) == (6, True), done.stderr
    assert json.loads(done.stdout)["error"]["kind"] == "damaged"


def test_a_part_whose_marker_a_kill_left_out_is_made_again(evaluated: Path, tmp_path: Path, cli_here: Cli) -> None:
    shutil.copytree(evaluated / "o", tmp_path / "o")
    file, marker = parts(tmp_path / "o", "ada")
    before = pq.read_table(file)
    file.write_bytes(b"half")
    marker.unlink()
    (tmp_path / "o" / "completions" / "ada" / ".x.parquet.1.2.tmp").write_bytes(b"left by a killed writer")
    done = cli_here(*COMMAND)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(file) == before
    assert not list((tmp_path / "o").rglob("*.tmp"))


def test_another_model_in_the_same_place_is_another_evaluation(
    tmp_path: Path, tiny: dict[str, Path], cli_here: Cli
) -> None:
    """Its bytes tell, not its name and times."""
    model = shutil.copytree(tiny["ada"], tmp_path / "m")
    command = ("eval", "--model", model, "--limit", "4", "--suite", "arithmetic", "--max-new-tokens", "4", "--out", "o")
    assert cli_here(*command).returncode == 0
    (file,) = model.glob("*.safetensors")
    (other,) = tiny["bob"].glob("*.safetensors")
    assert other.stat().st_size > 0
    config = model / "generation_config.json"
    config.write_text((config.read_text() if config.exists() else "{}") + " ")
    done = cli_here(*command)
    assert (done.returncode, "it differs in models" in done.stderr) == (2, True), done.stderr
    assert file.exists()
