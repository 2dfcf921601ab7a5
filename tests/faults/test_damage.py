"""Files of a finished run that were changed, moved or replaced: each is named, and no figure is made of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import Cli
from mutualrl.errors import DiskError, FileDamagedError, UsageError
from mutualrl.reporting.verify_run import verify_run
from mutualrl.storage.artifacts import commit_directory
from mutualrl.storage.files import (
    CHECKSUM_KEY,
    is_disk_failure,
    read_checksummed,
    try_read_json,
    write_atomic,
    write_checksummed,
)
from mutualrl.storage.rundir import RunDirectory
from runs import FinishedRun

EVAL = ("eval", "--limit", "4", "--max-new-tokens", "4", "--engine", "transformers", "--run", "r")


@pytest.fixture
def copy(unbroken: FinishedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unbroken.path, tmp_path / "r"))


def flip(path: Path, at: float = 0.5) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def model(run: Path, policy: str = "ada") -> Path:
    return run / "policies" / policy / "model"


def swap_models(run: Path) -> None:
    ada, bob = model(run), model(run, "bob")
    ada.rename(run / "aside")
    bob.rename(ada)
    (run / "aside").rename(bob)


def add_a_file(run: Path) -> None:
    (model(run) / "adapter_config.json").write_text("{}")


MODEL_HARMS: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: (model(run) / "model.safetensors").write_bytes(b"ten bytes!"), "10 bytes, expected"),
    (lambda run: flip(model(run) / "model.safetensors"), "model.safetensors: sha256"),
    (lambda run: flip(model(run) / "config.json"), "config.json: sha256"),
    (lambda run: (model(run) / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    (lambda run: (model(run) / "complete.json").unlink(), "complete.json: missing"),
    (lambda run: flip(model(run) / "complete.json"), "complete.json"),
    (add_a_file, "adapter_config.json: unexpected file"),
    (swap_models, "policy 'bob'; expected run"),
]


@pytest.mark.parametrize(("harm", "words"), MODEL_HARMS)
def test_a_changed_model_is_not_evaluated_nor_resumed_from(
    copy: Path, cli_here: Cli, harm: Callable[[Path], object], words: str
) -> None:
    harm(copy)
    done = cli_here(*EVAL)
    assert (done.returncode, words in done.stderr) == (6, True), done.stderr
    (copy / "summary.json").unlink()  # as if the supervisor had been killed before it wrote it
    done = cli_here("train", "--resume", "--run-dir", "r")
    assert (done.returncode, words in done.stderr) == (6, True), done.stderr
    assert not (copy / "summary.json").exists()
    verified = json.loads(cli_here("runs", "verify", "r", "--json").stdout)
    assert any(words in line for line in verified["damaged"]), verified["damaged"]


def test_weights_that_are_not_finite_are_not_evaluated_whatever_their_marker_says(copy: Path, cli_here: Cli) -> None:
    directory = model(copy)
    marker = read_checksummed(directory / "complete.json")
    assert marker is not None
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.inf)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "complete.json").unlink()
    directory.rename(copy / "staged")
    commit_directory(copy / "staged", directory, {"run_id": marker["run_id"], "policy": "ada", "step": 6})
    done = cli_here(*EVAL)
    assert (done.returncode, "weight 'model.norm.weight' is not finite" in done.stderr) == (4, True), done.stderr


@pytest.mark.parametrize("text", ["{}", "[", '{"validation": 3}'])
def test_a_result_of_another_shape_is_named_before_a_summary_is_written(copy: Path, cli_here: Cli, text: str) -> None:
    (copy / "summary.json").unlink()
    (copy / "policies" / "bob" / "result.json").write_text(text)
    done = cli_here("train", "--resume", "--run-dir", "r")
    assert (done.returncode, "bob/result.json" in done.stderr) == (6, True), done.stderr
    assert not (copy / "summary.json").exists()
    write_checksummed(copy / "policies" / "bob" / "result.json", {"steps": 6}, root=copy)  # sealed, and no result
    done = cli_here("train", "--resume", "--run-dir", "r")
    assert (done.returncode, "bob/result.json: initial_validation" in done.stderr) == (6, True), done.stderr


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("policies/ada/metrics.jsonl", "policies/ada/metrics.jsonl is left out: its bytes do not match its checksum"),
        ("policies/ada/rescues.jsonl", "policies/ada/rescues.jsonl is left out: its bytes do not match its checksum"),
        ("policies/ada/result.json", "policies/ada/result.json is left out"),
        ("policies/ada/before.json", "policies/ada/before.json is left out"),
        ("summary.json", "summary.json is left out"),
        ("recipe.yaml", "its recipe.yaml is missing or was changed"),
    ],
)
def test_a_flipped_bit_is_left_out_of_a_report_with_a_word(copy: Path, cli_here: Cli, name: str, noted: str) -> None:
    flip(copy / name)
    done = cli_here("report", "r", "--out", "page", "--json")
    assert done.returncode == 0, done.stderr
    notes = json.loads(done.stdout)["notes"]
    assert any(noted in note for note in notes), notes
    verified = cli_here("runs", "verify", "r", "--json")
    assert verified.returncode == 6
    assert any(name in line for line in json.loads(verified.stdout)["damaged"])


def test_every_file_of_a_run_that_nobody_touched_is_verified(copy: Path, cli_here: Cli) -> None:
    done = cli_here("runs", "verify", "r", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["damaged"]) == (0, [])
    expected = {"run.json", "recipe.yaml", "summary.json", "sessions.json", "before.json", "result.json", "model"}
    assert set(result["checked"]) == expected | {"metrics.jsonl", "rescues.jsonl", "checkpoints", "rounds", "claims"}
    assert result["checked"]["model"] == 2
    shown = cli_here("runs", "verify", "r")
    assert "| model" in shown.stdout


def test_no_file_of_a_run_passes_for_another_one(copy: Path) -> None:
    files = [path for path in sorted(copy.rglob("*.json")) if CHECKSUM_KEY in (try_read_json(path) or {})]
    content = {path: path.read_bytes() for path in files}
    names = {path.name for path in files}
    assert names >= {"run.json", "summary.json", "sessions.json", "before.json", "result.json", "attempt.json"}
    passed = []
    for path in files:
        for other in files:
            if content[other] == content[path]:
                continue
            path.write_bytes(content[other])
            try:
                if not verify_run(RunDirectory(copy)).damaged:
                    passed.append(f"{other.relative_to(copy)} as {path.relative_to(copy)}")
            except (UsageError, FileDamagedError):
                continue
            finally:
                path.write_bytes(content[path])
    assert passed == []
    assert verify_run(RunDirectory(copy)).damaged == []


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EMFILE", "ENFILE", "EFBIG"])
def test_a_failed_write_to_a_disk_names_file_and_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Every error number of a disk; the runs of test_disk_and_clock.py meet three of them."""
    number = getattr(errno, code)

    def failing(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(DiskError, match="f: 5 bytes cannot be written") as raised:
        write_atomic(tmp_path / "f", b"12345")
    assert not is_disk_failure(OSError(errno.ENOENT, "no such file"))
    assert raised.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


#: a run directory of others may hold anything; whoever looks at it neither waits nor reads without end
TRAPS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "directory": lambda path: path.mkdir(),
}


NAMES = (
    "run.json",
    "recipe.yaml",
    "summary.json",
    "policies/ada/metrics.jsonl",
    "policies/ada/result.json",
    "policies/ada/model/config.json",
    "exchange/ada/000000.json",
    "exchange/ada/000000.parquet",
    "exchange/ada/heartbeat.json",
    "supervisor/node-0.json",
)
#: a pipe in the place of every file; the other two where text, lines, sealed JSON, a model and a table are read
TRAPPED = [(name, "pipe") for name in NAMES] + [
    (name, trap) for name in NAMES[1:8:2] for trap in TRAPS if trap != "pipe"
]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "trap"), TRAPPED)
def test_pipes_and_endless_files_in_a_run_are_not_waited_for(copy: Path, cli_here: Cli, name: str, trap: str) -> None:
    (copy / name).unlink()
    TRAPS[trap](copy / name)
    for command in (("runs", "ls", "."), ("runs", "verify", "r"), ("watch", "r"), ("report", "r")):
        done = cli_here(*command)
        assert done.returncode in (0, 1, 2, 6), done.stderr
    (copy / "summary.json").is_file() and (copy / "summary.json").unlink()
    if name != "policies/ada/metrics.jsonl":
        done = cli_here(*EVAL)
        assert done.returncode in (0, 2, 4, 6), done.stderr


def nested(n: int) -> str:
    return "a: " + "[" * n + "]" * n


@pytest.mark.extended
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(9)),
        nested(100_000),
        "? " * 100_000,
        "- " * 100_000,
        "a: &a\n" * 30_000,
        "{a: " * 50_000,
        "a: '" + "x" * 240_000,
        "a: " + "9" * 200_000,
        "a: !!python/object/apply:os.system ['true']",
        "\u0000" * 100,
    ],
)
def test_a_bomb_for_a_recipe_is_a_line(copy: Path, cli_here: Cli, text: str) -> None:
    value = read_checksummed(copy / "run.json")
    assert value is not None
    other = copy.with_name("r2")
    shutil.copytree(copy, other)
    for run, content in ((copy, {**value, "recipe": text}), (other, {**value, "recipe": "", "format": 2})):
        write_checksummed(run / "run.json", content, root=run)
        (run / "recipe.yaml").write_text(text)
        done = cli_here("eval", "--run", run.name)
        assert done.returncode in (2, 6), done.stderr
        assert "Traceback" not in done.stderr
    listed = cli_here("runs", "ls", ".", "--json")
    assert listed.returncode == 0, listed.stderr
    assert len(json.loads(listed.stdout)["runs"]) == 2
    assert cli_here("report", copy.name, "--out", "page").returncode == 0


def test_a_long_run_is_listed_without_reading_its_lines(
    copy: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in bytes that are read of its metrics."""
    metrics = copy / "policies" / "ada" / "metrics.jsonl"
    line = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:
        for step in range(7, 20_007):
            file.write(json.dumps({**line, "step": step}) + "\n")
    assert metrics.stat().st_size > 8_000_000
    from mutualrl.reporting import run_reader

    read: list[int] = []
    tail = run_reader._tail

    def counted(path: Path, size: int) -> tuple[bytes, bool]:
        data, whole = tail(path, size)
        read.append(len(data))
        return data, whole

    monkeypatch.setattr(run_reader, "_tail", counted)
    monkeypatch.setattr(run_reader, "_lines", lambda *arguments: pytest.fail("every line was read"))
    (run,) = json.loads(cli_here("runs", "ls", ".", "--json").stdout)["runs"]
    assert run["policies"]["ada"]["step"] == 20_006
    assert run["policies"]["ada"]["last"] is not None
    assert sum(read) < 200_000
