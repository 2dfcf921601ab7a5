"""A sweep through the command line: run once, compared, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import PATIENCE, REPEATS, Cli, make_once
from mutualrl.storage.files import write_checksummed
from runs import wait_until

POOL = """
policies: [{name: ada, model: "tiny:ada"}]
task: arithmetic
hardware: {gpus: 0}
round: {prompts: 8, optimizer_steps: 1}
trainer: {num_generations: 4, max_completion_length: 20, learning_rate: 5e-4}
"""
SWEEP_FILE = """
seeds: 2
pools: [one.yaml]
set:
  run.steps: 3
  round.prompts: 8
  trainer.per_device_train_batch_size: 32
  run.save_every: 1
  run.validation_limit: 8
  run.validate_every: 0
arms:
  grpo: {regime: grpo, set: {run.publish: full}}
  grpo-noise: {regime: grpo-noise}
reference: grpo
evaluate: {samples: 2, limit: 4}
claims: claims.yaml
"""
CLAIMS = "claims: [{text: noise is better, one: grpo-noise, other: grpo}]\n"


def write_sweep(directory: Path, text: str = SWEEP_FILE) -> None:
    """Write the sweep file, its claims and its pool of one policy."""
    (directory / "s.yaml").write_text(text)
    (directory / "claims.yaml").write_text(CLAIMS)
    (directory / "one.yaml").write_text(POOL)


NOISE_ARM = next(line + "\n" for line in SWEEP_FILE.splitlines() if line.startswith("  grpo-noise"))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in ("seconds", "began")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a sweep file and the finished sweep in `out`."""

    def make(root: Path) -> None:
        write_sweep(root)
        command = [sys.executable, "-m", "mutualrl", "sweep", "s.yaml", "--out", "out", "--json"]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        (root / "printed.json").write_text(result.stdout)

    return make_once(tmp_path_factory, "sweep", make)


@pytest.mark.parametrize(("chosen", "expected"), [(None, "1"), ("3", "3")])
def test_command_of_a_piece_has_as_many_threads_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli_here: Cli, chosen: str | None, expected: str
) -> None:
    """Also on a machine with GPUs, where pieces are not pinned: policies of the pool need one core each."""
    write_sweep(tmp_path)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho threads $OMP_NUM_THREADS >>{tmp_path}/started\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("mutualrl.study.sweep.sys.executable", str(python))
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert cli_here("sweep", "s.yaml", "--out", "out").returncode != 0
    assert set((tmp_path / "started").read_text().splitlines()) == {f"threads {expected}"}


@pytest.fixture
def copy(finished_sweep: Path, tmp_path: Path) -> Path:
    """Return a writable copy of the sweep."""
    return Path(shutil.copytree(finished_sweep, tmp_path / "sweep"))


@pytest.mark.extended
def test_sweep_runs_every_piece_once_and_compares_them(copy: Path, cli: Cli) -> None:
    assert json.loads(cli("report", copy / "out", "--json").stdout)["page"].endswith("out/report/index.html")
    printed = json.loads((copy / "printed.json").read_text())
    results = json.loads((copy / "out" / "results.json").read_text())
    assert printed["results"].endswith("sweep/out/results.json")
    assert [(p["arm"], p["seed"]) for p in results["pieces"]] == [
        (a, s) for a in ("grpo", "grpo-noise") for s in range(2)
    ]
    too_few_seeds = ["one.yaml: 2 seeds of grpo, grpo-noise; 3 declared"]
    assert results["comparison"]["notes"] == too_few_seeds
    assert [line["claim"] for line in results["comparison"]["claims"]] == ["noise is better"]
    for piece in results["pieces"]:
        summary = json.loads(
            (copy / "out" / "pieces" / "one" / f"{piece['arm']}-{piece['seed']}" / "summary.json").read_text()
        )
        for name, policy in piece["policies"].items():
            result = summary["policies"][name]
            assert policy["after"]["all"] == result["validation"]["accuracy"]
            solved = [result[key]["solved"] for key in ("initial_validation", "validation")]
            assert solved[1].count("1") / 8 == policy["after"]["all"]
            still_solved = [after == "1" for before, after in zip(*solved, strict=True) if before == "1"]
            assert policy["retained"] == (sum(still_solved) / len(still_solved) if still_solved else None)
            assert list(policy["pass_at"]) == ["1", "2"]
            assert 0 <= policy["pass_at"]["1"] <= policy["pass_at"]["2"] <= 1
    assert not list((copy / "out").glob("pieces/*/*/policies/*/checkpoints"))
    before = (copy / "out" / "results.json").read_bytes()
    logs = {log: log.stat().st_mtime_ns for log in (copy / "out").rglob("*.log")}
    rerun = cli("sweep", copy / "s.yaml", "--out", copy / "out")
    assert rerun.returncode == 0, rerun.stderr
    assert "| grpo-noise | 2 |" in rerun.stdout
    assert (copy / "out" / "results.json").read_bytes() == before
    assert {log: log.stat().st_mtime_ns for log in (copy / "out").rglob("*.log")} == logs
    plan = json.loads(cli("sweep", copy / "s.yaml", "--out", copy / "out", "--dry-run", "--json").stdout)
    assert (plan["done"], plan["missing"], plan["minutes"], plan["bytes"]) == (4, [], 0.0, 0)


@pytest.mark.extended
def test_what_was_changed_after_a_sweep_began_is_noted(copy: Path, cli: Cli, cli_here: Cli) -> None:
    """Change what the commands of the pieces do not show (a pool's file), and what they need not show (a seed less)."""
    before = json.loads((copy / "out" / "results.json").read_text())
    assert before["registration"]["changes"] == []
    assert not [note for note in before["comparison"]["notes"] if "after the sweep began" in note]
    (copy / "one.yaml").write_text(POOL.replace("5e-4", "4e-4"))
    (copy / "s.yaml").write_text(SWEEP_FILE.replace("seeds: 2", "seeds: 1"))
    for _ in range(2):  # said once
        assert cli("sweep", copy / "s.yaml", "--out", copy / "out").returncode == 0
    after = json.loads((copy / "out" / "results.json").read_text())
    assert after["registration"]["sha256"] == before["registration"]["sha256"]
    ((change,),) = [[each["changes"] for each in after["registration"]["changes"]]]
    assert change == ["seeds: left out 1", "trainer.learning_rate: 0.0005 -> 0.0004 (recipes: 2)"]
    (note,) = [note for note in after["comparison"]["notes"] if "after the sweep began" in note]
    assert note.endswith("seeds: left out 1; trainer.learning_rate: 0.0005 -> 0.0004 (recipes: 2)")
    assert note in json.loads(cli_here("compare", copy / "out", "--json").stdout)["notes"]


@pytest.mark.extended
def test_claims_are_those_that_the_sweep_began_with(copy: Path, cli: Cli, cli_here: Cli) -> None:
    """The same bytes with a younger date are the same claims; other ones are tested by `compare --claims` alone."""
    began = json.loads((copy / "out" / "results.json").read_text())["comparison"]["registered"]
    os.utime(copy / "claims.yaml", (4e9, 4e9))
    touched = json.loads(cli_here("compare", copy / "out", "--claims", copy / "claims.yaml", "--json").stdout)
    assert touched["registered"] == began
    assert not any("older than the claims" in note or "claims differ" in note for note in touched["notes"])
    (copy / "claims.yaml").write_text("claims: [{text: other, one: grpo-noise, other: grpo, says: below}]\n")
    assert cli("sweep", copy / "s.yaml", "--out", copy / "out").returncode == 0
    after = json.loads((copy / "out" / "results.json").read_text())
    assert after["comparison"]["registered"] == began
    assert [claim["claim"] for claim in after["comparison"]["claims"]] == ["noise is better"]
    assert any(note.startswith("tested are the claims that it began with") for note in after["comparison"]["notes"])


@pytest.mark.extended
def test_compare_accepts_a_sweep_or_its_runs_and_notes_late_claims(copy: Path, cli_here: Cli) -> None:
    of_sweep = json.loads(cli_here("compare", copy / "out", "--json").stdout)
    runs = sorted((copy / "out" / "pieces" / "one").glob("*-?"))
    result = cli_here("compare", *runs, "--claims", copy / "claims.yaml", "--json")
    assert result.returncode == 0, result.stderr
    of_runs = json.loads(result.stdout)
    (pool,) = of_runs["differences"]
    assert of_runs["differences"][pool]["grpo-noise"] == of_sweep["differences"]["one.yaml"]["grpo-noise"]
    assert of_runs["reference"] == {pool: "grpo"}
    (copy / "later.yaml").write_text("claims: [{text: other, one: grpo-noise, other: grpo, says: below}]\n")
    later = json.loads(cli_here("compare", copy / "out", "--claims", copy / "later.yaml", "--json").stdout)
    assert any("the claims differ from those that the sweep began with" in note for note in later["notes"])
    later_runs = json.loads(cli_here("compare", *runs, "--claims", copy / "later.yaml", "--json").stdout)
    assert any("after the first run began" in note for note in later_runs["notes"])
    (copy / "s.yaml").rename(copy / "moved.yaml")  # the directory suffices
    assert json.loads(cli_here("compare", copy / "out", "--json").stdout) == of_sweep
    (copy / "moved.yaml").rename(copy / "s.yaml")
    unknown = cli_here("compare", copy / "out", "--reference", "prp")
    assert (unknown.returncode, "found 'prp', expected one of grpo, grpo-noise" in unknown.stderr) == (2, True)
    mixed = cli_here("compare", copy / "out", runs[0])
    assert (mixed.returncode, "compare it on its own" in mixed.stderr) == (2, True)
    twice = cli_here("compare", runs[0], runs[0])
    assert twice.returncode == 2, twice.stdout


@pytest.mark.release
def test_sweep_killed_repeatedly_has_the_same_results(finished_sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_sweep, tmp_path, dirs_exist_ok=True)  # with the dates, which are in the results
    (tmp_path / "out" / "results.json").unlink()
    for seed in ("grpo-1", "grpo-noise-1"):  # half of the pieces are finished and remain
        for path in (tmp_path / "out" / "pieces" / "one").glob(f"{seed}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    command = [sys.executable, "-m", "mutualrl", "sweep", "s.yaml", "--out", "out"]
    piece, rng = tmp_path / "out" / "pieces" / "one" / "grpo-1", random.Random(0)
    with (tmp_path / "printed.txt").open("wb") as log:
        for moment in ("policies/ada/checkpoints/step-*", "summary.json"):  # in training, before the evaluation
            for _ in range(REPEATS):
                process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
                wait_until(lambda moment=moment: any(piece.glob(moment)))
                if REPEATS > 1:
                    time.sleep(rng.uniform(0, 5))
                assert process.poll() is None or REPEATS > 1, (tmp_path / "printed.txt").read_text()
                process.kill()
                process.wait()
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        assert process.wait(PATIENCE) == 0, (tmp_path / "printed.txt").read_text()
    results = [json.loads((root / "out" / "results.json").read_text()) for root in (finished_sweep, tmp_path)]
    assert without_times(results[0]) == without_times(results[1])


@pytest.mark.extended
def test_failed_piece_is_reported_and_the_others_run(tmp_path: Path, cli: Cli) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def broken(completions, **columns):\n"
        "    if len(completions) < 32:\n"
        "        return [0.0] * len(completions)  # when it is tried\n"
        "    raise ValueError('no judge today')\n"
    )
    text = SWEEP_FILE.replace("seeds: 2", "seeds: [0]").replace("claims: claims.yaml", "")
    text = text.replace(
        "{regime: grpo-noise}", f"{{regime: grpo, set: {{task.reward: '{reward}:broken'}}, differs: [task]}}"
    )
    write_sweep(tmp_path, text)
    result = cli("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out", "--json")
    assert result.returncode == 1, result.stdout
    assert list(json.loads(result.stdout)["failed"]) == ["one.yaml, grpo-noise, seed 0"]
    assert "failed: 1; the same command retries them" in result.stderr
    assert "no judge today" in result.stderr
    assert "pieces are missing: one.yaml, grpo-noise, seed 0" in result.stderr
    assert "| grpo | 1 |" in (tmp_path / "out" / "results.md").read_text()
    assert "- 1 of 2 pieces are missing" in (tmp_path / "out" / "results.md").read_text()


def test_arm_whose_start_would_be_refused_is_refused_before_any_piece_runs(tmp_path: Path, cli_here: Cli) -> None:
    short = "{regime: grpo-noise, set: {task.max_prompt_tokens: 1}, differs: [task]}"
    write_sweep(tmp_path, SWEEP_FILE.replace("{regime: grpo-noise}", short))
    result = cli_here("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert "refused: 1\n  - arm 'grpo-noise' on 'one.yaml': " in result.stderr
    assert "task.max_prompt_tokens" in result.stderr
    assert not (tmp_path / "out").exists()
    assert cli_here("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out", "--dry-run").returncode == 2


def test_every_reason_of_every_arm_is_said_where_one_has_no_data(tmp_path: Path, cli_here: Cli) -> None:
    absent = "{regime: grpo-noise, set: {task.name: dataset, task.data: absent.jsonl, hardware.gpus: 3}, differs: [task, hardware]}"
    write_sweep(tmp_path, SWEEP_FILE.replace("{regime: grpo-noise}", absent))
    result = cli_here("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert "refused: 2\n  - arm 'grpo-noise' on 'one.yaml': data file not found" in result.stderr
    assert "- arm 'grpo-noise' on 'one.yaml': this machine lacks 3 of the 3 GPUs" in result.stderr


@pytest.mark.extended
def test_piece_whose_evaluation_cannot_be_stored_is_reported(finished_sweep: Path, tmp_path: Path, cli: Cli) -> None:
    write_sweep(
        tmp_path,
        SWEEP_FILE.replace("seeds: 2", "seeds: [0]").replace(NOISE_ARM, "").replace("claims: claims.yaml\n", ""),
    )
    piece = Path("out", "pieces", "one", "grpo-0")
    shutil.copytree(finished_sweep / piece, tmp_path / piece)
    shutil.copy2(finished_sweep / f"{piece}.began.json", tmp_path / f"{piece}.began.json")
    shutil.rmtree(tmp_path / piece / "evaluations")
    (tmp_path / piece / "evaluations").write_text("a file, not a directory")
    result = cli("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert result.returncode == 1, result.stdout
    assert "evaluations: found a file, expected a directory" in result.stderr
    assert not (tmp_path / f"{piece}.json").exists()


@pytest.mark.release
def test_signal_stops_the_pieces_and_the_same_command_resumes(tmp_path: Path, cli: Cli) -> None:
    text = SWEEP_FILE.replace("seeds: 2", "seeds: [0]").replace("run.steps: 3", "run.steps: 40")
    text = text.replace("claims: claims.yaml", "").replace(NOISE_ARM, "").replace("evaluate:", "budget: {}  #")
    write_sweep(tmp_path, text)
    command = [sys.executable, "-m", "mutualrl", "sweep", "s.yaml", "--out", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ})
    checkpoints = tmp_path / "out" / "pieces" / "one" / "grpo-0" / "policies" / "ada" / "checkpoints"
    deadline = time.monotonic() + PATIENCE
    while not list(checkpoints.glob("step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "the same command resumes it" in errors) == (130, True), errors
    run = checkpoints.parents[2]
    assert not (run / "summary.json").exists()
    result = cli("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert json.loads((run / "policies" / "ada" / "result.json").read_text())["resumed_from"] != []


@pytest.mark.extended
def test_pieces_of_another_command_are_rejected(copy: Path, tmp_path: Path, cli: Cli) -> None:
    write_sweep(tmp_path, SWEEP_FILE.replace("run.steps: 3", "run.steps: 4"))
    result = cli("sweep", tmp_path / "s.yaml", "--out", copy / "out")
    assert result.returncode == 2
    assert "is from another command" in result.stderr
    assert "run.steps=4" in result.stderr


@pytest.mark.release
def test_started_piece_of_another_command_and_another_grid_are_rejected(tmp_path: Path, cli: Cli) -> None:
    text = SWEEP_FILE.replace("claims: claims.yaml", "").replace("seeds: 2", "seeds: [0]").replace(NOISE_ARM, "")
    write_sweep(tmp_path, text.replace("run.steps: 3", "run.steps: 400"))
    command = [sys.executable, "-m", "mutualrl", "sweep", "s.yaml", "--out", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "out" / "pieces" / "one" / "grpo-0"
    deadline = time.monotonic() + PATIENCE
    while not (run / "run.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.wait()
    (tmp_path / "s.yaml").write_text(text)
    changed = cli("sweep", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert changed.returncode == 2
    assert "is from another command" in changed.stderr
    (tmp_path / "other.yaml").write_text(text.replace("grpo:", "other:").replace("reference: grpo", ""))
    other = cli("sweep", tmp_path / "other.yaml", "--out", tmp_path / "out")
    assert other.returncode == 2
    assert "holds another sweep (pools one.yaml; arms grpo)" in other.stderr


def test_compare_executes_no_code_from_a_sweep_directory(tmp_path: Path, cli_here: Cli) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\n")
    (tmp_path / "evil.yaml").write_text(f"arms: {{a: {{regime: '{evil}:SPEC'}}}}\n")
    root = tmp_path / "out"
    root.mkdir()
    grid = {"pools": ["tiny"], "arms": ["a"], "seeds": [0], "reference": "a"}
    for content in ({"grid": grid, "sweep_file": str(tmp_path / "evil.yaml"), "claims": None}, {"grid": 3}, {}):
        write_checksummed(root / "sweep.json", content, root=root)
        result = cli_here("compare", root)
        assert result.returncode in (2, 6), result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "was-run").exists()
