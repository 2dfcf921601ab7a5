"""Runs with a source from the command line: layouts, wrong verdicts, kills, adapters, ranks, two learners."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from recorded_files import LAYOUTS, write_jsonl

from conftest import PATIENCE, Cli
from mutualrl.see.inspection import tables
from mutualrl.see.location import record_store
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks.arithmetic import OPERATIONS, split_problems
from runs import FinishedRun, Run, logged_steps, rolled_back, verify_intact, wait_until

pytestmark = pytest.mark.slow
TRAINER = (
    *("--set", "trainer.num_generations=4", "--set", "trainer.max_completion_length=20"),
    *("--set", "trainer.learning_rate=5e-4", "--set", "trainer.per_device_train_batch_size=16"),
    *("--set", "round.prompts=8", "--set", "run.validate_every=0", "--set", "run.validation_limit=4"),
)


def data(directory: Path) -> tuple[Path, dict[str, list[str]]]:
    """Write a task of 32 problems; return its path and two solutions of each, 40 % of them wrong."""
    problems = [problem for operation in OPERATIONS for problem in split_problems(operation)[0][:16]]
    rows = [{"prompt": p.prompt, "answer": p.answer} for p in problems]
    texts: dict[str, list[str]] = {}
    for number, problem in enumerate(problems):
        wrong = " 98 \\boxed{98}"
        texts[problem.prompt] = [
            wrong if number % 5 < 2 else problem.working,
            wrong if number % 5 > 2 else f" \\boxed{{{problem.answer}}}",
        ]
    return write_jsonl(directory / "rows.jsonl", rows), texts


def command(directory: Path, book: Path, *arguments: str, models: tuple[str, ...] = ("ada",)) -> tuple[str, ...]:
    pool = [word for name in models for word in ("--model", f"tiny:{name}")]
    task = ("--task", "dataset", "--data", str(directory / "rows.jsonl"))
    validation = ("--set", f"task.validation_data={directory / 'rows.jsonl'}")
    return ("--regime", "sgt", *pool, "--source", f"book=recorded:{book}", *task, *validation, *TRAINER, *arguments)


def finished(run: Run) -> FinishedRun:
    assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
    return run


def records(run: Path, name: str) -> list[Mapping[str, Any]]:
    """Return a member's rollouts in the exchange."""
    directory = RunDirectory(run)
    parts = list(tables(record_store(directory), directory.info().run_id, [name]))
    rows: list[Mapping[str, Any]] = pa.concat_tables(parts).to_pylist()
    return rows


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(("open_r1", "trl"), marks=pytest.mark.release),
        pytest.param(("deep_math", "open_thoughts", "synthetic_1", "trl"), marks=pytest.mark.release),
    ],
    ids="-".join,
)
@pytest.mark.timeout(3600)
def test_layouts_of_the_same_texts_give_the_same_weights(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    _, texts = data(tmp_path)
    weights = {}
    for name in layouts:
        (tmp_path / name).mkdir()
        book = LAYOUTS[name](tmp_path / name / "book", texts)
        run = finished(Run(tmp_path / name, *command(tmp_path, book, "--steps", "3"), of=()))
        weights[name] = run.weights()
        assert verify_intact(run.path)
    assert len({json.dumps(each, sort_keys=True) for each in weights.values()}) == 1
    assert weights["trl"]


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_killed_runs_resume_and_no_wrong_text_enters_the_loss(tmp_path: Path, cli: Cli) -> None:
    """Two learners, one with adapters and on two ranks; the source's file is gone when the run resumes."""
    _, texts = data(tmp_path)
    book = LAYOUTS["open_r1"](tmp_path / "book", texts)  # claims that all are correct
    (tmp_path / "devices.yaml").write_text("policies: {ada: {processes: 2}, bob: {processes: 1}}\n")
    devices = ("--device-map", str(tmp_path / "devices.yaml"))
    saves = ("--set", "run.save_every=1", "--set", "run.keep_checkpoints=9", "--steps", "4")
    lora = ("--set", "policies.bob.lora={r: 4}")
    settings = ("--set", "regime.memory=2", "--set", "regime.max_uses_per_prompt=2")
    run = finished(
        Run(tmp_path, *command(tmp_path, book, *saves, *lora, *settings, *devices, models=("ada", "bob")), of=())
    )
    book.unlink()
    copy = rolled_back(run.path, tmp_path / "copy", {"ada": 3, "bob": 2})
    shutil.rmtree(copy / "exchange" / "book")  # published again, the same
    result = cli("train", "--resume", "--run-dir", copy, "--json", *devices, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    resumed = Run.__new__(Run)
    resumed.path = copy
    assert resumed.weights() == run.weights()
    assert len(run.weights()) == 2
    assert {(r["round"], r["prompt_id"], r["rollout"], r["y_text"]) for r in records(copy, "book")} <= {
        (r["round"], r["prompt_id"], r["rollout"], r["y_text"]) for r in records(run.path, "book")
    }
    offered = records(run.path, "book")
    wrong = [row for row in offered if row["reward"] == 0.0]
    assert 0.3 < len(wrong) / len(offered) < 0.5
    rewards = {(row["round"], row["prompt_id"], row["rollout"]): row["reward"] for row in offered}
    learnt = 0
    for policy in ("ada", "bob"):
        uses: dict[str, int] = {}
        for line in (run.path / "policies" / policy / "rescues.jsonl").read_text().splitlines():
            rescue = json.loads(line)
            uses[rescue["prompt_id"]] = uses.get(rescue["prompt_id"], 0) + 1
            if rescue["peer"] == "book":
                learnt += 1
                assert "98" not in rescue["answer"]
                of_text = [
                    r
                    for (_, prompt, index), r in rewards.items()
                    if (prompt, index) == (rescue["prompt_id"], rescue["rollout"])
                ]
                assert set(of_text) == {1.0}
        assert max(uses.values()) <= 2
    assert learnt > 0
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["sources"]["book"]["confirmed"] > 0


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_run_with_one_policy_and_a_source_is_killed_and_resumed(tmp_path: Path, cli: Cli) -> None:
    """A missing store of the source is written again from its file; another file is refused, and so is damage."""
    _, texts = data(tmp_path)
    book = LAYOUTS["deep_math"](tmp_path / "book", texts)
    saves = ("--set", "run.save_every=1", "--steps", "6")
    (tmp_path / "whole").mkdir()
    whole = finished(Run(tmp_path / "whole", *command(tmp_path, book, *saves), of=()))
    run = Run(tmp_path, *command(tmp_path, book, *saves), of=())
    wait_until(lambda: logged_steps(run.path, "ada") >= 2 or run.process.poll() is not None)
    run.end()
    stored = run.path / "sources" / "book.parquet"
    content = stored.read_bytes()
    stored.write_bytes(content[:-1] + b"x")
    result = cli("train", "--resume", "--run-dir", run.path)
    assert "book.parquet: not readable" in result.stderr
    stored.unlink()
    other = book.read_text()
    book.write_text(other.replace("98", "97"))
    result = cli("train", "--resume", "--run-dir", run.path)
    assert "its file has other texts or rewards than when the run began" in result.stderr
    book.write_text(other)
    run.begin("--resume")
    finished(run)
    assert stored.read_bytes() == content
    assert run.weights() == whole.weights()
    listed = json.loads(cli("exchange", "ls", run.path, "--json").stdout)["policies"]
    assert [(entry["policy"], entry["rounds"]) for entry in listed] == [("ada", 6), ("book", 6)]
    stored.write_bytes(content[:-1] + b"x")
    verified = cli("runs", "verify", run.path)
    assert verified.returncode == 6
    assert "book.parquet" in verified.stdout + verified.stderr
