"""Runs resumed from any of their checkpoints end bit for bit as if they had never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import PATIENCE, Cli, make_once, needs_zero
from mutualrl.storage.files import write_checksummed
from runs import FinishedRun, Run, rolled_back, verify_intact

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
REUSED_BATCHES = (
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

#: the arguments of the run and the step from which each policy resumes
CASES = {
    "naive pooling and pairs, inside a reused generation batch, in the third epoch": (
        (*REUSED_BATCHES, "--set", "regime={name: prp+sgt, prp: {denominator: snapshot}}", "--data"),
        {"ada": 9, "bob": 6},
    ),
    "two ranks and one, adapters with dropout under xgrpo, whitened, one policy from the beginning": (
        (
            *("--set", "regime={name: xgrpo}", "--set", "lora.r=4", "--set", "lora.dropout=0.1"),
            *("--set", "round.whiten_advantages=true", "--set", "trainer.scale_rewards=none"),
            *DDP,
        ),
        {"ada": 3, "bob": 0},
    ),
    "dynamic sampling, inside a batch that is used twice, in the second epoch": (
        (*REUSED_BATCHES, "--set", "regime={name: grpo}", "--set", "round.resample=true", "--data"),
        {"ada": 9, "bob": 6},
    ),
    "ZeRO-3, two ranks and one": (("--set", "launch.strategy=zero3", *DDP), {"ada": 3, "bob": 2}),
    "FSDP2, two ranks and one": (("--set", "launch.strategy=fsdp2", *DDP), {"ada": 3, "bob": 2}),
    "FSDP2, adapters with dropout, under the KL term": (
        (
            *("--set", "launch.strategy=fsdp2", "--set", "lora.r=4", "--set", "lora.dropout=0.1"),
            *("--set", "regime={name: xgrpo}", "--set", "trainer.beta=0.1", *DDP),
        ),
        {"ada": 2, "bob": 3},
    ),
}


def write_prompts(directory: Path) -> str:
    """Write 8 prompts and return their path: one round, used for four steps, is an epoch."""
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
                *([pytest.mark.release, needs_zero] if "ZeRO" in name else [pytest.mark.extended]),
            ],
        )
        for name in CASES
    ],
)
@pytest.mark.timeout(3600)
def test_resumed_run_equals_the_unbroken_run(tiny: dict[str, Path], tmp_path: Path, cli: Cli, case: str) -> None:
    arguments, steps = CASES[case]
    if "--data" in arguments:
        arguments = (
            *arguments,
            write_prompts(tmp_path),
            "--task",
            "dataset",
            "--set",
            f"task.validation_data={write_prompts(tmp_path)}",
        )
    (tmp_path / "devices.yaml").write_text(DEVICES)
    arguments = tuple(str(tmp_path / "devices.yaml") if argument == "DEVICES" else argument for argument in arguments)
    devices = arguments[-2:] if "--device-map" in arguments else ()
    run = Run(tmp_path, *BASE, *arguments)
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    copy = rolled_back(run.path, tmp_path / "copy", steps)
    result = cli("train", "--resume", "--run-dir", copy, "--json", *devices, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert {name: p["resumed_from"] for name, p in summary["policies"].items()} == {
        name: [step] if step else [] for name, step in steps.items()
    }
    unbroken, resumed = Run.__new__(Run), Run.__new__(Run)
    unbroken.path, resumed.path = run.path, copy
    assert resumed.weights() == unbroken.weights()
    assert len(unbroken.weights()) == 2
    for policy in steps:
        adapter = copy / "policies" / policy / "adapter" / "adapter_model.safetensors"
        assert adapter.is_file() == ("lora.r=4" in arguments)
        expected, rows = unbroken.metrics(policy), resumed.metrics(policy)
        assert [row["step"] for row in rows] == [row["step"] for row in expected]
        for key in (
            "loss",
            "reward",
            "sgt/pairs",
            "prp/ratio_p99",
            "epoch",
            "num_tokens",
            "resample/tokens",
            "learning_rate",
        ):
            assert [row.get(key) for row in rows] == [row.get(key) for row in expected], key


JUDGE = """
import os, signal
from pathlib import Path
from mutualrl.tasks.boxed import boxed_reward

def judge(completions, **columns):
    if len(completions) < 32:
        return boxed_reward(completions, **columns)  # a validation, of four prompts
    calls = Path(os.environ["CALLS"])
    number = len(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text("x" * number)
    if number == int(os.environ["DIES_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return boxed_reward(completions, **columns)
"""


@pytest.mark.extended
def test_policy_killed_between_two_attempts_ends_with_the_same_weights(tmp_path: Path) -> None:
    """The first two rounds have four batches each: the kill is in the second, before its third batch is scored."""
    (tmp_path / "judge.py").write_text(JUDGE)
    runs = {}
    for name, dies_at in (("unbroken", "0"), ("killed", "7")):
        (tmp_path / name).mkdir()
        environment = {"CALLS": str(tmp_path / name / "calls"), "DIES_AT": dies_at}
        arguments = ("--steps", "3", "--set", "round.resample=true", "--set", "round.prompts=8")
        reward = ("--set", f"task.reward={tmp_path / 'judge.py'}:judge")
        of = ("--regime", "grpo", "--model", "tiny:ada", "--task", "arithmetic")
        runs[name] = Run(tmp_path / name, *BASE, *arguments, *reward, of=of, **environment)
    for run in runs.values():
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    assert len((tmp_path / "killed" / "calls").read_text()) > 7
    rows = [run.metrics("ada") for run in runs.values()]
    assert [row["resample/attempts"] for row in rows[0]][:2] == [3, 3]
    assert json.loads((runs["killed"].path / "summary.json").read_text())["policies"]["ada"]["attempts"] == 2
    assert runs["killed"].weights() == runs["unbroken"].weights()
    assert len(runs["killed"].weights()) == 1
    for key in ("loss", "reward", "num_tokens", "resample/dropped", "resample/tokens", "prompts/dead"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key


@pytest.fixture(scope="module")
def finished(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    def make(directory: Path) -> None:
        run = Run(directory, *BASE, "--steps", "2", "--set", "round.prompts=8")
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()

    return FinishedRun(make_once(tmp_path_factory, "finished", make))


REJECTED = {
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
def test_resume_rejects_or_reports_each_changed_setting(
    finished: FinishedRun, tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    copy = rolled_back(finished.path, tmp_path / "copy", {"ada": 1, "bob": 1})
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    for assignment, message in REJECTED.items():
        result = cli_here("train", "--resume", "--run-dir", copy, "--set", assignment)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr, result.stderr
        assert "Leave these out" in result.stderr
    changed = {p for p in copy.rglob("*") if p.is_file() and before.get(p) != p.read_bytes()}
    assert {p.name for p in changed} <= {".node-0.lock"}
    result = cli("train", "--resume", "--run-dir", copy, "--set", "run.max_restarts=5", "--set", "run.peer_timeout=3.0")
    assert result.returncode == 0, result.stderr  # the last attempt's stale heartbeat is not treated as the new one's
    assert "run.max_restarts is now 5 (was 2)" in result.stderr
    assert "run.peer_timeout is now 3.0" in result.stderr
    assert "frozen" not in result.stderr
    result = cli_here("train", "--resume", "--run-dir", copy)
    assert result.returncode == 2
    assert "nothing to resume" in result.stderr
    assert "--clean" in result.stderr


@pytest.mark.extended
def test_resume_checks_data_format_placement_checkpoints_and_versions(
    finished: FinishedRun, tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    copy = rolled_back(finished.path, tmp_path / "copy", {"ada": 2, "bob": 2})
    info = json.loads((copy / "run.json").read_text())
    for key, value, message in (
        ("fingerprint", {**info["fingerprint"], "data_sha256": "0"}, "data_sha256"),
        ("format", info["format"] + 1, f"format {info['format'] + 1}, this version reads {info['format']}"),
        (
            "placement",
            {**info["placement"], "ada": {**info["placement"]["ada"], "processes": 4}},
            "ran with processes 4",
        ),
    ):
        write_checksummed(copy / "run.json", {**info, key: value}, root=copy)
        result = cli_here("train", "--resume", "--run-dir", copy)
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
    write_checksummed(copy / "run.json", {**info, "versions": {**info["versions"], "trl": "1.15.0"}}, root=copy)
    weights = copy / "policies" / "ada" / "checkpoints" / "step-000002" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    shutil.copy(copy / "policies" / "bob" / "metrics.jsonl", tmp_path / "before.jsonl")
    with (copy / "policies" / "bob" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # torn
    result = cli("train", "--resume", "--run-dir", copy)
    assert result.returncode == 0, result.stderr
    assert "trl is 1.16" in result.stderr
    log = next((copy / "policies" / "ada" / "logs").glob("attempt-1*")).read_text()
    assert "checkpoint skipped" in result.stderr
    assert str(weights) in result.stderr
    assert "resuming from checkpoint step-1" in log
    assert verify_intact(copy)["intact"]  # the damaged checkpoint was written again
    resumed = Run.__new__(Run)
    resumed.path = copy
    assert resumed.weights() == finished.weights()
    assert (copy / "policies" / "bob" / "metrics.jsonl").read_bytes() == (tmp_path / "before.jsonl").read_bytes()


@pytest.mark.extended
def test_resume_reports_damaged_files_and_ignores_empty_status_files(
    finished: FinishedRun, tmp_path: Path, cli: Cli, cli_here: Cli
) -> None:
    copy = rolled_back(finished.path, tmp_path / "copy", {"ada": 1, "bob": 2})
    result_file = copy / "policies" / "ada" / "result.json"
    for path in (result_file, copy / "exchange" / "ada" / "missing_peers.json", copy / "supervisor" / "sessions.json"):
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(b"")
        result = cli_here("train", "--resume", "--run-dir", copy)
        assert result.returncode == 6, result.stderr
        assert str(path) in result.stderr
        assert "Traceback" not in result.stderr
        path.unlink() if before is None else path.write_bytes(before)
    for path in ((copy / "exchange" / "ada" / "heartbeat.json"), (copy / "supervisor" / "node-1.json")):
        path.write_bytes(b"")  # written without fsync: a power cut leaves them empty
    weights = copy / "policies" / "ada" / "checkpoints" / "step-000001" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    for _ in range(2):
        result = cli("train", "--resume", "--run-dir", copy)
        assert result.returncode == 6, result.stderr
        assert "policy 'ada' has no intact checkpoint" in result.stderr
    weights.write_bytes(content)
    result = cli("train", "--resume", "--run-dir", copy)
    assert result.returncode == 0, result.stderr


@pytest.mark.extended
@pytest.mark.slow
def test_verify_reports_missing_rounds_that_a_checkpoint_recorded_as_published(
    finished: FinishedRun, tmp_path: Path, cli_here: Cli
) -> None:
    for number, name in enumerate(("000001.json", "")):
        copy = tmp_path / str(number)
        shutil.copytree(finished.path, copy)
        shutil.rmtree(copy / "exchange" / "ada") if not name else (copy / "exchange" / "ada" / name).unlink()
        result = cli_here("runs", "verify", copy)
        assert result.returncode == 6, result.stdout
        assert "policy ada: " in result.stderr
        assert "published round(s) are missing" in result.stderr
