"""`mutualrl eval` and `mutualrl tasks` through the real command line, on the tiny pool and two pretrained models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conftest import PATIENCE, Cli
from mutualrl.tasks.boxed import boxed_score


def evaluate(cli: Cli, *arguments: str | Path, **environment: str) -> dict[str, Any]:
    completed = cli("eval", *arguments, "--json", "--engine", "transformers", **environment)
    assert completed.returncode == 0, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout)
    return result


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.mark.slow
def test_pool_is_evaluated_and_every_completion_is_stored(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    result = evaluate(cli_here, "--pool", "tiny", "--out", "o")
    assert result["tasks"]["arithmetic"] == {
        "evaluated": "held-out problems",
        "n": 64,
        "dropped": [],
        "max_new_tokens": 20,
        "reward": "exact match",
    }
    for name in ("ada", "bob"):
        rows = pq.read_table(tmp_path / "o" / "completions" / name).to_pylist()
        assert len(rows) == 64
        hits = [boxed_score(row["y_text"], row["answer"]) for row in rows]
        assert hits == [row["reward"] for row in rows]
        m = result["models"][name]
        assert m["accuracy"] == sum(hits) / 64 > 0.2
        assert m["accuracy"] == pytest.approx((m["by_group"]["+"] + m["by_group"]["*"]) / 2)
        assert m["tasks"]["arithmetic"]["accuracy"] == m["accuracy"] == m["mean_accuracy"]
    assert json.loads((tmp_path / "o" / "results.json").read_text())["models"] == result["models"]
    compared = json.loads(cli_here("complementarity", "--rollouts", "o/completions", "--json").stdout)
    assert compared["policies"] == ["ada", "bob"]
    assert [row["learner_success"] for row in compared["pairs"]] == [
        result["models"][m]["accuracy"] for m in ("ada", "bob")
    ]
    shown = cli_here("eval", "--pool", "tiny", "--out", "o", "--engine", "transformers")
    assert (tmp_path / "o" / "results.md").read_text() == shown.stdout
    assert "| ada | arithmetic | held-out problems | transformers | 64 |" in shown.stdout


@pytest.mark.slow
def test_samples_give_pass_at_k_and_results_are_reproducible(cli_here: Cli, tiny: dict[str, Path]) -> None:
    arguments = ("--model", "tiny:ada", "--samples", "4", "--limit", "16", "--seed", "7")
    result = evaluate(cli_here, *arguments)
    assert (result["samples"], result["temperature"]) == (4, 1.0)
    passes = result["models"]["tiny:ada"]["pass_at_k"]
    assert result["models"]["tiny:ada"]["accuracy"] == pytest.approx(passes["1"])
    assert passes["1"] <= passes["2"] <= passes["4"]
    assert evaluate(cli_here, *arguments) == result


@pytest.mark.extended
@pytest.mark.slow
def test_killed_evaluation_resumes_to_the_same_result(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}+{b}+{c}:", "answer": str(a + b + c), "group": str(a)}
        for a in range(2, 9)
        for b in range(2, 9)
        for c in range(2, 25)
    ]
    data = write(tmp_path / "d.jsonl", *rows)
    options = [
        "--model",
        "tiny:ada",
        "--model",
        "tiny:bob",
        "--suite",
        "dataset",
        "--data",
        str(data),
        "--max-new-tokens",
        "24",
        "--samples",
        "2",
        "--engine",
        "transformers",
        "--json",
    ]
    uninterrupted = evaluate(cli_here, *options[:-3], "--out", "whole")
    process = subprocess.Popen(
        [sys.executable, "-m", "mutualrl", "eval", *options, "--out", "cut"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    parts = tmp_path / "cut" / "completions"
    deadline = time.monotonic() + PATIENCE
    while len(list(parts.rglob("_*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # a part without its marker is generated again: the kill came between the two
    marked = [p.with_name(f"{p.stem[1:]}.parquet") for p in parts.rglob("_*.json")]
    mtimes = {p: p.stat().st_mtime_ns for p in marked}
    assert 2 <= len(mtimes) < len(list((tmp_path / "whole" / "completions").rglob("*.parquet")))
    resumed = evaluate(cli_here, *options[:-3], "--out", "cut")
    assert resumed["models"] == uninterrupted["models"]
    assert {p: p.stat().st_mtime_ns for p in mtimes} == mtimes
    changed = cli_here("eval", *options, "--out", "cut", "--seed", "1")
    assert changed.returncode == 2
    assert "holds another evaluation (it differs in sampling)" in json.loads(changed.stdout)["error"]["message"]


@pytest.mark.slow
def test_pretrained_models_on_real_datasets_count_every_prompt(cli_here: Cli, real_data: Path) -> None:
    models = [real_data / "models" / name for name in ("stories260K", "babyllama-tok361")]
    result = evaluate(
        cli_here,
        "--model",
        models[0],
        "--model",
        models[1],
        "--suite",
        "math500,arc,boolq,hellaswag",
        "--data-dir",
        real_data,
        "--limit",
        "6",
        "--max-new-tokens",
        "8",
    )
    for model in result["models"].values():
        assert model["n"] == 24
        assert model["accuracy"] == 0
        assert {task: figures["n"] for task, figures in model["tasks"].items()} == dict.fromkeys(result["tasks"], 6)
    # no passage fits a context of 256 characters: such a prompt is counted as wrong and reported, never dropped
    assert result["models"][str(models[1])]["tasks"]["boolq"]["too_long"] == 1.0
    assert result["tasks"]["arc"]["evaluated"] == "ARC-Easy.validation.jsonl, ARC-Challenge.validation.jsonl"
    assert set(result["models"][str(models[0])]["tasks"]["math500"]["facets"]) == {"level"}


def test_prompts_are_shown_exactly_as_a_model_sees_them(cli_here: Cli, tmp_path: Path) -> None:
    row = {"goal": "g", "sol1": "\x1b[31m[/bold]", "sol2": "b\u202e", "label": 1}
    path = write(tmp_path / "p.jsonl", row, row | {"goal": "h"})
    result = cli_here("tasks", "show", "piqa", "--data", path, "--limit", "1", "--json")
    (prompt,) = json.loads(result.stdout)["prompts"]
    assert prompt["prompt"].endswith("A. \x1b[31m[/bold]\nB. b\u202e")
    assert (prompt["answer"], prompt["group"], json.loads(result.stdout)["n"]) == ("B", "piqa", 2)
    shown = cli_here("tasks", "show", "piqa", "--data", path)
    assert "[/bold]" in shown.stdout
    assert not set(shown.stdout) & set("\x1b\u202e")
    assert cli_here("tasks", "show", "piqa", "--data", path, "--json").stdout.count('"id"') == 2


def test_tasks_are_listed(cli_here: Cli) -> None:
    names = [task["name"] for task in json.loads(cli_here("tasks", "ls", "--json").stdout)["tasks"]]
    assert {"math", "math500", "arc", "boolq", "mixture", "dataset", "arithmetic"} <= set(names)
    assert "no public labels" in cli_here("tasks", "ls").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "name what to evaluate"),
        (("--pool", "tiny", "--model", "tiny:ada"), 2, "name what to evaluate"),
        (("--pool", "tiny", "--suite", "math,"), 2, "expected comma-separated task names"),
        (("--pool", "tiny", "--suite", "maths"), 2, "unknown task 'maths'"),
        (("--pool", "tiny", "--suite", "math,arc", "--data", "x.jsonl"), 2, "use --data-dir"),
        (("--pool", "tiny", "--suite", "arc", "--data", "x", "--data-dir", "y"), 2, "give one"),
        (("--pool", "tiny", "--suite", "arc", "--data-dir", "rows.jsonl"), 2, "expected a directory"),
        (("--pool", "tiny", "--suite", "arc", "--data", "rows.jsonl"), 2, "these are the fields of task 'boolq'"),
        (("--pool", "tiny", "--suite", "boolq"), 2, "cannot be loaded from the hub: HF_HUB_OFFLINE is set"),
        (("--pool", "tiny", "--suite", "boolq", "--data", "empty.jsonl"), 2, "the file has no rows"),
        (("--pool", "tiny", "--samples", "2", "--temperature", "0"), 2, "2 identical responses"),
        (("--pool", "tiny", "--engine", "sglang"), 2, "expected one of: transformers, vllm"),
        (("--pool", "tiny", "--template", "{x}"), 2, "apply to task 'dataset'"),
        (("--pool", "tiny", "--out", "rows.jsonl"), 2, "is a file, expected a directory"),
        (("--pool", "tiny", "--out", "."), 2, "holds files that do not belong to an evaluation"),
        (("--model", "nowhere/at/all"), 2, "neither a directory nor a hub id"),
    ],
)
def test_invalid_request_gives_one_clear_error(
    cli_here: Cli, arguments: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "rows.jsonl", {"passage": "p", "question": "q", "answer": True})
    (tmp_path / "empty.jsonl").write_text("\n")
    result = cli_here("eval", *arguments, "--json")
    assert result.returncode == code, result.stderr
    assert message in json.loads(result.stdout)["error"]["message"]
    assert "Traceback" not in result.stderr


def test_missing_vllm_is_reported(cli_here: Cli) -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    result = cli_here("eval", "--pool", "tiny", "--engine", "vllm")
    assert result.returncode == 4
    assert "vLLM is not installed; pip install 'mutualrl[node]'" in result.stderr


@pytest.mark.slow
def test_pool_with_custom_rewards_is_evaluated_and_compared_by_them(
    cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def short(completions, answer, **_):\n    return [float(len(c) < 12) / 2 for c in completions]\n"
        "def right(completions, answer, **_):\n    return [None if a not in c else 1.0 for c, a in zip(completions, answer)]\n"
    )
    (tmp_path / "pool.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        "task: {name: arithmetic, reward: ['mine.py:short', 'mine.py:right']}\ntrainer: {reward_weights: [2.0, 1.0], max_completion_length: 24}\n"
    )
    result = evaluate(cli_here, "--pool", "pool.yaml", "--limit", "12", "--out", "o")
    assert "mine.py:short" in result["tasks"]["arithmetic"]["reward"]
    for name, model in result["models"].items():
        rows = pq.read_table(tmp_path / "o" / "completions" / name).to_pylist()
        expected = [(len(r["y_text"]) < 12) + float(r["answer"] in r["y_text"]) for r in rows]
        assert [r["reward"] for r in rows] == expected
        assert model["accuracy"] == pytest.approx(sum(expected) / 12)
        assert model["no_box"] is None
    completed = cli_here(
        "complementarity",
        "--pool",
        "pool.yaml",
        "--prompts",
        "6",
        "--samples",
        "2",
        "--json",
        "--engine",
        "transformers",
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["buckets"][0]["mean_reward"] > 0


def test_suite_has_one_limit_of_new_tokens_for_every_model_source(tmp_path: Path) -> None:
    from made_runs import add_model, edit_recipe, made_run
    from mutualrl.engines.sampling import SamplingOptions
    from mutualrl.evaluation.plan import plan_evaluation
    from mutualrl.evaluation.request import EvalRequest
    from mutualrl.tasks.options import RowOptions

    data = tmp_path / "math.jsonl"
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1), "subject": "Algebra", "level": 1} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = made_run(tmp_path / "r")
    edit_recipe(run, lambda recipe: recipe["trainer"].update(max_completion_length=20))
    for name in ("ada", "bob"):
        add_model(run, name)
    for flags in ({"run": run}, {"pool": "tiny"}, {"models": ("tiny:ada",)}):
        (task,) = plan_evaluation(EvalRequest(suite="math", rows=RowOptions(data=data), **flags)).tasks  # type: ignore[arg-type]
        assert task.max_new_tokens == 3072
        sampling = SamplingOptions(max_new_tokens=7)
        (task,) = plan_evaluation(
            EvalRequest(suite="math", rows=RowOptions(data=data), sampling=sampling, **flags)
        ).tasks  # type: ignore[arg-type]
        assert task.max_new_tokens == 7
    (run_task,) = plan_evaluation(EvalRequest(run=run)).tasks
    assert run_task.max_new_tokens == 20  # a run's task keeps its training limit
