"""Changed, moved or replaced files of a finished run: each is reported, and none is used."""

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
from made_runs import made_run
from mutualrl.errors import DiskError, FileDamagedError, MachineError, UsageError
from mutualrl.launch.group import agent
from mutualrl.runs.verify import verify_run
from mutualrl.storage.allocation import Allocation, BatchPlan
from mutualrl.storage.artifacts import commit_directory
from mutualrl.storage.files import (
    CHECKSUM_KEY,
    free_space,
    is_disk_failure,
    read_checksummed,
    try_read_json,
    write_atomic,
    write_checksummed,
)
from mutualrl.storage.rundir import RunDirectory
from runs import FinishedRun, mounted_tmpfs

EVAL = ("eval", "--limit", "4", "--max-new-tokens", "4", "--engine", "transformers", "--run", "r")


@pytest.fixture
def copy(unbroken: FinishedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(unbroken.path, tmp_path / "r"))


def flip(path: Path, at: float = 0.5) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def model_of(run: Path, policy: str = "ada") -> Path:
    return run / "policies" / policy / "model"


def swap_models(run: Path) -> None:
    ada, bob = model_of(run), model_of(run, "bob")
    ada.rename(run / "aside")
    bob.rename(ada)
    (run / "aside").rename(bob)


def add_file(run: Path) -> None:
    (model_of(run) / "adapter_config.json").write_text("{}")


MODEL_DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: (model_of(run) / "model.safetensors").write_bytes(b"ten bytes!"), "10 bytes, expected"),
    (lambda run: flip(model_of(run) / "model.safetensors"), "model.safetensors: sha256"),
    (lambda run: flip(model_of(run) / "config.json"), "config.json: sha256"),
    (lambda run: (model_of(run) / "tokenizer.json").unlink(), "tokenizer.json: is missing"),
    (lambda run: (model_of(run) / "complete.json").unlink(), "complete.json: missing"),
    (lambda run: flip(model_of(run) / "complete.json"), "complete.json"),
    (add_file, "adapter_config.json: unexpected file"),
    (swap_models, "policy 'bob'; expected run"),
]


@pytest.mark.parametrize(("damage", "message"), MODEL_DAMAGES)
def test_changed_models_are_neither_evaluated_nor_resumed(
    copy: Path, cli_here: Cli, damage: Callable[[Path], object], message: str
) -> None:
    damage(copy)
    result = cli_here(*EVAL)
    assert (result.returncode, message in result.stderr) == (6, True), result.stderr
    (copy / "summary.json").unlink()  # as if the supervisor had been killed before writing it
    result = cli_here("train", "--resume", "--run-dir", "r")
    assert (result.returncode, message in result.stderr) == (6, True), result.stderr
    assert not (copy / "summary.json").exists()
    report = json.loads(cli_here("runs", "verify", "r", "--json").stdout)
    assert any(message in line for line in report["damaged"]), report["damaged"]


def test_non_finite_weights_are_not_evaluated_even_with_a_valid_marker(copy: Path, cli_here: Cli) -> None:
    directory = model_of(copy)
    marker = read_checksummed(directory / "complete.json")
    assert marker is not None
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.inf)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "complete.json").unlink()
    directory.rename(copy / "staged")
    commit_directory(copy / "staged", directory, {"run_id": marker["run_id"], "policy": "ada", "step": 6})
    result = cli_here(*EVAL)
    assert (result.returncode, "weight 'model.norm.weight' is not finite" in result.stderr) == (4, True), result.stderr


@pytest.mark.parametrize("text", ["{}", "[", '{"validation": 3}'])
def test_malformed_results_are_reported_before_a_summary_is_written(copy: Path, cli_here: Cli, text: str) -> None:
    (copy / "summary.json").unlink()
    (copy / "policies" / "bob" / "result.json").write_text(text)
    result = cli_here("train", "--resume", "--run-dir", "r")
    assert (result.returncode, "bob/result.json" in result.stderr) == (6, True), result.stderr
    assert not (copy / "summary.json").exists()
    write_checksummed(copy / "policies" / "bob" / "result.json", {"steps": 6}, root=copy)  # incomplete
    result = cli_here("train", "--resume", "--run-dir", "r")
    assert (result.returncode, "bob/result.json: initial_validation" in result.stderr) == (6, True), result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("policies/ada/metrics.jsonl", "policies/ada/metrics.jsonl is left out: its bytes do not match its checksum"),
        ("policies/ada/rescues.jsonl", "policies/ada/rescues.jsonl is left out: its bytes do not match its checksum"),
        ("policies/ada/result.json", "policies/ada/result.json is left out"),
        ("policies/ada/before.json", "policies/ada/before.json is left out"),
        ("summary.json", "summary.json is left out"),
        ("recipe.yaml", "its recipe.yaml is missing or was changed"),
    ],
)
def test_reports_leave_out_corrupted_files_with_a_note(copy: Path, cli_here: Cli, name: str, message: str) -> None:
    flip(copy / name)
    result = cli_here("report", "r", "--out", "page", "--json")
    assert result.returncode == 0, result.stderr
    notes = json.loads(result.stdout)["notes"]
    assert any(message in note for note in notes), notes
    verified = cli_here("runs", "verify", "r", "--json")
    assert verified.returncode == 6
    assert any(name in line for line in json.loads(verified.stdout)["damaged"])


def test_verify_checks_every_file_of_an_intact_run(copy: Path, cli_here: Cli) -> None:
    result = cli_here("runs", "verify", "r", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["damaged"]) == (0, [])
    expected = {
        "run.json",
        "recipe.yaml",
        "summary.json",
        "sessions.json",
        "before.json",
        "result.json",
        "model",
        "prompts.json",
    }
    assert set(report["checked"]) == expected | {
        *("metrics.jsonl", "rescues.jsonl", "samples.jsonl", "checkpoints", "rounds", "claims")
    }
    assert report["checked"]["model"] == 2
    table = cli_here("runs", "verify", "r").stdout
    assert "| model" in table


def test_verify_finds_a_removed_newest_round_and_a_link_out_of_the_run(copy: Path, tmp_path: Path) -> None:
    run = RunDirectory(copy)
    assert not verify_run(run).damaged
    newest = sorted((copy / "exchange" / "ada").glob("0*.json"))[-1]
    newest.rename(tmp_path / newest.name)
    (damage,) = verify_run(run).damaged
    assert damage.startswith("policy ada: 1 published round(s) are missing")
    (tmp_path / newest.name).rename(newest)
    (copy / "policies" / "ada").rename(tmp_path / "elsewhere")
    (copy / "policies" / "ada").symlink_to(tmp_path / "elsewhere")
    assert any("found a link out of the run" in line for line in verify_run(run).damaged)
    (copy / "exchange" / "loop").symlink_to("loop")
    assert any("loop: found a link to itself" in line for line in verify_run(run).damaged)


def test_a_run_killed_before_its_first_round_is_not_damaged(copy: Path) -> None:
    for name in ("exchange", "policies"):
        shutil.rmtree(copy / name)
        (copy / name).mkdir()
    (copy / "summary.json").unlink()
    assert verify_run(RunDirectory(copy)).damaged == []


@pytest.mark.extended
def test_verify_rejects_swapped_files(copy: Path) -> None:
    files = [path for path in sorted(copy.rglob("*.json")) if CHECKSUM_KEY in (try_read_json(path) or {})]
    content = {path: path.read_bytes() for path in files}
    names = {path.name for path in files}
    assert names >= {"run.json", "summary.json", "sessions.json", "before.json", "result.json", "attempt.json"}
    undetected = []
    for path in files:
        for other in files:
            if content[other] == content[path]:
                continue
            path.write_bytes(content[other])
            try:
                if not verify_run(RunDirectory(copy)).damaged:
                    undetected.append(f"{other.relative_to(copy)} as {path.relative_to(copy)}")
            except (UsageError, FileDamagedError):
                continue
            finally:
                path.write_bytes(content[path])
    assert undetected == []
    assert verify_run(RunDirectory(copy)).damaged == []


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "EMFILE", "ENFILE", "EFBIG"])
def test_failed_writes_report_file_and_bytes_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Cover every error number of a disk; the runs of test_disk_and_clock.py cover three of them."""
    number = getattr(errno, code)

    def failing_fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(DiskError, match="f: 5 bytes cannot be written") as raised:
        write_atomic(tmp_path / "f", b"12345")
    assert not is_disk_failure(OSError(errno.ENOENT, "no such file"))
    assert raised.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


#: a shared run directory may contain anything; no command that reads it may block or read endlessly
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
#: a pipe in place of every file; the other two in place of one file each of YAML, JSON lines, a model, and Parquet
TRAPPED = [(name, "pipe") for name in NAMES] + [
    (name, trap) for name in NAMES[1:8:2] for trap in TRAPS if trap != "pipe"
]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "trap"), TRAPPED)
def test_commands_do_not_block_on_pipes_and_endless_files(copy: Path, cli_here: Cli, name: str, trap: str) -> None:
    (copy / name).unlink()
    TRAPS[trap](copy / name)
    for command in (("runs", "ls", "."), ("runs", "verify", "r"), ("watch", "r"), ("report", "r")):
        result = cli_here(*command)
        assert result.returncode in (0, 1, 2, 6), result.stderr
    (copy / "summary.json").is_file() and (copy / "summary.json").unlink()
    if name != "policies/ada/metrics.jsonl":
        result = cli_here(*EVAL)
        assert result.returncode in (0, 2, 4, 6), result.stderr


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
def test_yaml_bombs_in_recipes_are_rejected_without_a_traceback(copy: Path, cli_here: Cli, text: str) -> None:
    info = read_checksummed(copy / "run.json")
    assert info is not None
    write_checksummed(copy / "run.json", {**info, "recipe": text}, root=copy)
    (copy / "recipe.yaml").write_text(text)
    result = cli_here("eval", "--run", copy.name)
    assert result.returncode in (2, 6), result.stderr
    assert "Traceback" not in result.stderr
    listed = cli_here("runs", "ls", ".", "--json")
    assert listed.returncode == 0, listed.stderr
    assert len(json.loads(listed.stdout)["runs"]) == 1
    assert cli_here("report", copy.name, "--out", "page").returncode == 0


def test_report_says_that_the_validation_before_training_is_missing(tmp_path: Path, cli_here: Cli) -> None:
    run = made_run(tmp_path / "r", finished=False)
    (run / "policies" / "bob" / "before.json").unlink()
    notes = json.loads(cli_here("report", run, "--json").stdout)["notes"]
    assert "policies/bob/before.json is missing: its accuracy before training is not shown" in notes
    assert not any("policies/ada/before.json" in note for note in notes)


def test_listing_a_long_run_reads_only_the_end_of_its_metrics(
    copy: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the bytes read from its metrics."""
    metrics = copy / "policies" / "ada" / "metrics.jsonl"
    line = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:
        for step in range(7, 20_007):
            file.write(json.dumps({**line, "step": step}) + "\n")
    assert metrics.stat().st_size > 8_000_000
    from mutualrl.runs import lines, logs

    sizes: list[int] = []
    read = lines.NewLines.read

    def counting_read(self: lines.NewLines) -> list[bytes]:
        found = read(self)
        sizes.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(lines.NewLines, "read", counting_read)
    monkeypatch.setattr(logs, "_lines", lambda *arguments: pytest.fail("every line was read"))
    (run,) = json.loads(cli_here("runs", "ls", ".", "--json").stdout)["runs"]
    assert run["policies"]["ada"]["step"] == 20_006
    assert run["policies"]["ada"]["last"] is not None
    assert 0 < sum(sizes) < 200_000


@pytest.mark.parametrize(
    "name",
    [
        "supervisor/node-0.json",
        "evaluations",
        "exchange/ada/heartbeat.json",
        "policies/ada/metrics.jsonl",
        "policies/ada/logs/attempt-0.log",
        "policies/ada/checkpoints/latest.json",
        "policies/ada/checkpoints/step-000006",
        "policies/ada/checkpoints/step-000006/complete.json",
    ],
)
def test_path_of_another_kind_is_named_by_verify_and_resume(copy: Path, cli_here: Cli, name: str) -> None:
    path = copy / name
    if path.is_dir():
        shutil.rmtree(path)
    if name in ("evaluations", "policies/ada/checkpoints/step-000006"):
        path.write_text("not a directory")
    else:
        path.unlink(missing_ok=True)
        path.mkdir(parents=True)
    (copy / "summary.json").unlink()
    verified = cli_here("runs", "verify", "r", "--json")
    assert verified.returncode == 6
    assert any(f"{path}: found a " in line for line in json.loads(verified.stdout)["damaged"])
    resumed = cli_here("train", "--resume", "--run-dir", "r", "--dry-run")
    assert (resumed.returncode, f"{path}: found a " in resumed.stderr) == (6, True), resumed.stderr


def test_disk_without_inodes_is_called_that(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "nr_inodes=4") as disk:
        (disk / "a").touch()
        (disk / "b").touch()
        (disk / "c").touch()
        assert "but no inodes free: remove files" in free_space(disk)
    assert free_space(tmp_path).endswith(" files free")


def test_removed_run_directory_is_not_made_anew(copy: Path) -> None:
    run = RunDirectory(copy)
    allocation = Allocation("ada", (), 1, 1, "ddp", BatchPlan(4, 4, 16, 1, 1))
    shutil.rmtree(copy)
    with pytest.raises(MachineError, match="is gone: it was renamed or removed"):
        agent(run, allocation, 0)
    assert not copy.exists()
