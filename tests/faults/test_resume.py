"""Run that resumes from any of its checkpoints ends as if it had never stopped, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import PATIENCE, Cli, make_once, needs_zero
from mutualrl.storage.files import write_checksummed
from runs import FinishedRun, Run, rolled_back, verified

BASE = (
    "--set",
    "run.save_every=1",
    "--set",
    "run.keep_checkpoints=9",
    "--set",
    "run.validate_every=0",
    "--set",
    "run.validation_limit=4",
    "--set",
    "trainer.per_device_train_batch_size=16",
)
TWICE = (
    "--steps",
    "12",
    "--set",
    "round.prompts=8",
    "--set",
    "round.optimizer_steps=2",
    "--set",
    "trainer.num_iterations=2",
)
DDP = ("--steps", "4", "--set", "round.prompts=16", "--set", "round.optimizer_steps=2", "--device-map", "DEVICES")
DEVICES = "policies: {ada: {processes: 2}, bob: {processes: 1}}\n"

#: what the run is, and the steps that its policies resume from
CASES = {
    "within a generation batch, used twice, in the third epoch": ((*TWICE, "--data"), {"ada": 9, "bob": 6}),
    "two ranks and one, with adapters, naive pooling within a batch": (
        ("--set", "regime={name: prp, denominator: snapshot}", "--set", "lora.r=4", "--set", "lora.dropout=0.0", *DDP),
        {"ada": 3, "bob": 1},
    ),
    "ZeRO-3, two ranks and one": (("--set", "launch.strategy=zero3", *DDP), {"ada": 3, "bob": 2}),
    "adapters with dropout under xgrpo, one policy from its start": (
        (
            "--steps",
            "4",
            "--set",
            "round.prompts=8",
            "--set",
            "round.optimizer_steps=2",
            "--set",
            "lora.r=4",
            "--set",
            "lora.dropout=0.1",
            "--set",
            "regime={name: xgrpo}",
        ),
        {"ada": 0, "bob": 3},
    ),
}


def own_data(directory: Path) -> str:
    """Return 8 prompts: one round, used for four steps, is an epoch."""
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in (2, 3) for b in (2, 3, 4, 5)]
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.extended,
                *([needs_zero] if "ZeRO" in name else []),
            ],
        )
        for name in CASES
    ],
)
@pytest.mark.timeout(3600)
def test_a_resumed_run_is_the_unbroken_run(tiny: dict[str, Path], tmp_path: Path, cli: Cli, case: str) -> None:
    arguments, steps = CASES[case]
    if "--data" in arguments:
        arguments = (
            *arguments,
            own_data(tmp_path),
            "--task",
            "dataset",
            "--set",
            f"task.validation_data={own_data(tmp_path)}",
        )
    (tmp_path / "devices.yaml").write_text(DEVICES)
    arguments = tuple(str(tmp_path / "devices.yaml") if each == "DEVICES" else each for each in arguments)
    devices = arguments[-2:] if "--device-map" in arguments else ()
    run = Run(tmp_path, *BASE, *arguments)
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    copy = rolled_back(run.path, tmp_path / "copy", steps)
    done = cli("train", "--resume", "--run-dir", copy, "--json", *devices, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert {name: p["resumed_from"] for name, p in summary["policies"].items()} == {
        name: [step] if step else [] for name, step in steps.items()
    }
    before, after = Run.__new__(Run), Run.__new__(Run)
    before.path, after.path = run.path, copy
    assert after.weights() == before.weights()
    assert len(before.weights()) == 2
    for policy in steps:
        adapter = copy / "policies" / policy / "adapter" / "adapter_model.safetensors"
        assert adapter.is_file() == ("lora.r=4" in arguments)
        (one, other) = (before.metrics(policy), after.metrics(policy))
        assert [line["step"] for line in other] == [line["step"] for line in one]
        for key in ("loss", "reward", "sgt/pairs", "prp/ratio_p99", "epoch", "num_tokens", "learning_rate"):
            assert [line.get(key) for line in other] == [line.get(key) for line in one], key


@pytest.fixture(scope="module")
def finished(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    def make(directory: Path) -> None:
        run = Run(directory, *BASE, "--steps", "2", "--set", "round.prompts=8")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()

    return FinishedRun(make_once(tmp_path_factory, "finished", make))


REFUSED = {
    "trainer.learning_rate=1e-3": "trainer.learning_rate: 0.001, the run has 0.0005",
    "run.steps=9": "run.steps: 9, the run has 2",
    "run.seed=1": "run.seed: 1, the run has 0",
    "regime.weight=0.5": "regime.weight: 0.5, the run has 0.1",
    "policies=[{name: ada, model: 'tiny:bob'}, {name: bob, model: 'tiny:bob'}]": "policies.ada.model",
    "launch.processes=2": "launch.processes: 2, the run has None",
    "task={name: math}": "task.name: 'math', the run has 'arithmetic'",
}


@pytest.mark.extended
@pytest.mark.slow
def test_what_changed_is_refused_by_name_or_said(
    finished: FinishedRun, tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    copy = rolled_back(finished.path, tmp_path / "copy", {"ada": 1, "bob": 1})
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    for assignment, words in REFUSED.items():
        done = cli_here("train", "--resume", "--run-dir", copy, "--set", assignment)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr, done.stderr
        assert "Leave these out" in done.stderr
    changed = {p for p in copy.rglob("*") if p.is_file() and before.get(p) != p.read_bytes()}
    assert {p.name for p in changed} <= {".node-0.lock"}
    done = cli("train", "--resume", "--run-dir", copy, "--set", "run.max_restarts=5", "--set", "run.peer_timeout=3.0")
    assert done.returncode == 0, done.stderr  # the last attempt's heartbeat, which stands still, is not the new one's
    assert "run.max_restarts is now 5 (was 2)" in done.stderr
    assert "run.peer_timeout is now 3.0" in done.stderr
    assert "frozen" not in done.stderr
    again = cli_here("train", "--resume", "--run-dir", copy)
    assert again.returncode == 2
    assert "nothing to resume" in again.stderr
    assert "--clean" in again.stderr


@pytest.mark.extended
def test_changed_data_a_damaged_checkpoint_and_another_version(
    finished: FinishedRun, tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    copy = rolled_back(finished.path, tmp_path / "copy", {"ada": 2, "bob": 2})
    info = json.loads((copy / "run.json").read_text())
    for key, value, words in (
        ("fingerprint", {**info["fingerprint"], "data_sha256": "0"}, "data_sha256"),
        ("format", info["format"] + 1, f"written by a newer mutualrl (format {info['format'] + 1}"),
        ("format", 0, "an older mutualrl wrote it"),
        (
            "placement",
            {**info["placement"], "ada": {**info["placement"]["ada"], "processes": 4}},
            "ran with processes 4",
        ),
    ):
        write_checksummed(copy / "run.json", {**info, key: value}, root=copy)
        done = cli_here("train", "--resume", "--run-dir", copy)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
    write_checksummed(copy / "run.json", {**info, "versions": {**info["versions"], "trl": "1.15.0"}}, root=copy)
    weights = copy / "policies" / "ada" / "checkpoints" / "step-000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    shutil.copy(copy / "policies" / "bob" / "metrics.jsonl", tmp_path / "before.jsonl")
    with (copy / "policies" / "bob" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # torn
    done = cli("train", "--resume", "--run-dir", copy)
    assert done.returncode == 0, done.stderr
    assert "trl is 1.16" in done.stderr
    log = next((copy / "policies" / "ada" / "logs").glob("attempt-1*")).read_text()
    assert "checkpoint skipped" in log
    assert str(weights) in log
    assert "resuming from checkpoint step-1" in log
    assert verified(copy)["whole"]  # the damaged one was made again
    before, after = Run.__new__(Run), Run.__new__(Run)
    before.path, after.path = finished.path, copy
    assert after.weights() == before.weights()
    assert (copy / "policies" / "bob" / "metrics.jsonl").read_bytes() == (tmp_path / "before.jsonl").read_bytes()


@pytest.mark.extended
def test_damaged_files_of_a_run_are_named_and_passing_ones_are_not_needed(
    finished: FinishedRun, tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    copy = rolled_back(finished.path, tmp_path / "copy", {"ada": 1, "bob": 2})
    result = copy / "policies" / "ada" / "result.json"
    for path in (result, copy / "exchange" / "ada" / "absences.json", copy / "supervisor" / "sessions.json"):
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(b"")
        done = cli_here("train", "--resume", "--run-dir", copy)
        assert done.returncode == 6, done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr
        path.unlink() if before is None else path.write_bytes(before)
    for path in ((copy / "exchange" / "ada" / "heartbeat.json"), (copy / "supervisor" / "node-1.json")):
        path.write_bytes(b"")  # not waited for by their writers: a power cut leaves them empty
    weights = [copy / "policies" / "ada" / "checkpoints" / f"step-{step:06d}" / "model.safetensors" for step in (1,)]
    selected = weights[0].read_bytes()
    weights[0].write_bytes(selected[:-1])
    for _ in range(2):
        done = cli("train", "--resume", "--run-dir", copy)
        assert done.returncode == 6, done.stderr
        assert "policy 'ada' has no intact checkpoint" in done.stderr
    weights[0].write_bytes(selected)
    done = cli("train", "--resume", "--run-dir", copy)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
@pytest.mark.slow
def test_verify_misses_rounds_that_a_checkpoint_says_were_published(
    finished: FinishedRun, tmp_path: Path, cli_here: Cli
) -> None:
    for number, gone in enumerate(("000001.json", "")):
        copy = tmp_path / str(number)
        shutil.copytree(finished.path, copy)
        shutil.rmtree(copy / "exchange" / "ada") if not gone else (copy / "exchange" / "ada" / gone).unlink()
        done = cli_here("exchange", "verify", copy)
        assert done.returncode == 6, done.stdout
        assert "policy ada: " in done.stderr
        assert "published round(s) are missing" in done.stderr
