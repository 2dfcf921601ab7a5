"""Strictness of evaluation: requests, prompts, names and killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import HEAVY, PATIENCE, Cli, imported
from mutualrl.evaluation.plan import plan_evaluation
from mutualrl.evaluation.request import EvalRequest


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": "COMPLETELY other", "answer": "7", "prompt_id": "p1"},
        {"prompt": "4+3:", "answer": "7", "prompt_id": "p1", "group": "new"},
        {"prompt": "4+3:", "answer": "8", "prompt_id": "p1"},
    ],
)
def test_completions_are_never_reused_for_another_prompt(
    changed: dict[str, str], cli_here: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    arguments = (
        "eval",
        "--model",
        "tiny:ada",
        "--suite",
        "dataset",
        "--data",
        "d.jsonl",
        "--max-new-tokens",
        "8",
        "--engine",
        "transformers",
        "--out",
        "o",
        "--json",
    )
    write(tmp_path / "d.jsonl", {"prompt": "4+3:", "answer": "7", "prompt_id": "p1"})
    assert cli_here(*arguments).returncode == 0
    write(tmp_path / "d.jsonl", changed)
    result = cli_here(*arguments)
    assert result.returncode == 2
    assert "it differs in tasks" in json.loads(result.stdout)["error"]["message"]


def test_files_left_by_a_killed_writer_are_ignored(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / ".request.json.1.2.tmp").touch()
    result = cli_here("eval", "--model", "tiny:ada", "--limit", "2", "--engine", "transformers", "--out", "o", "--json")
    assert result.returncode == 0, result.stderr


def startup_cpu_seconds() -> float:
    """Return the user CPU seconds that a scorer takes to import its library, before its first answer."""
    command = [sys.executable, "-m", "mutualrl.evaluation.verify_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        seconds = float(psutil.Process(worker.pid).cpu_times().user)
        worker.kill()
    return seconds


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")
def test_scorers_exit_when_their_command_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *({"completion": "\\boxed{9^{9^{9}}}", "answer": "1"} for _ in range(40)))
    startup = startup_cpu_seconds()
    process = subprocess.Popen(
        [sys.executable, "-m", "mutualrl", "eval", "--score", str(path), "--also", "math-verify", "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workers: list[psutil.Process] = []
    while process.poll() is None:  # until both evaluate a tower
        workers = psutil.Process(process.pid).children()
        with contextlib.suppress(psutil.NoSuchProcess):  # one has reached its deadline
            if len(workers) == 2 and all(worker.cpu_times().user > startup + 0.2 for worker in workers):
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE)
    for worker in alive:
        worker.kill()
    assert not alive


def test_names_are_escaped_for_the_terminal(cli_here: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "g\x1b]0;PWN\x07.jsonl", {"completion": "x", "answer": "1"})
    shown = cli_here("eval", "--score", path)
    assert shown.returncode == 0
    assert not set(shown.stdout) & set("\x1b\x07")
    missing = cli_here("eval", "--score", tmp_path / "is:x:not:smile:there.jsonl")
    assert "is:x:not:smile:there.jsonl" in missing.stderr.replace("\n", "")


def test_shown_prompts_keep_emoji_codes_and_roles(cli_here: Cli, tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "At :100: say :smile:\tnow"}]
    write(tmp_path / "d.jsonl", {"prompt": conversation, "answer": "1"})
    shown = cli_here("tasks", "show", "dataset", "--data", "d.jsonl").stdout
    assert "[system] Be brief\n[user] At :100: say :smile:\tnow\n" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tasks", "show", "arithmetic", "--template", "{x}"), "are for task 'dataset'"),
        (("tasks", "show", "arithmetic", "--split", "test"), "expected train or validation"),
        (("tasks", "show", "arithmetic", "--limit", "0"), "greater than or equal to 1"),
        (("eval", "--score", "s.jsonl", "--temperature", "0"), "--temperature: no effect with --score"),
        (("eval", "--pool", "tiny", "--temperature", "1e-40"), "expected 0 (greedy), or 0.01 to 10"),
        (("eval", "--pool", "tiny", "--suite", "dataset", "--template", "{x}"), "name it with --data"),
        (("eval", "--nonsense"), "No such option: --nonsense"),
    ],
)
def test_invalid_flags_are_reported_as_one_json_object(
    cli_here: Cli, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "s.jsonl", {"completion": "x", "answer": "1"})
    result = cli_here(*arguments, "--json")
    assert result.returncode == 2
    assert message in json.loads(result.stdout)["error"]["message"]


def test_task_requested_in_several_ways_is_evaluated_once(real_data: Path) -> None:
    request = plan_evaluation(EvalRequest(models=("tiny:ada",), suite="mixture,math,arc", data_dir=real_data, limit=2))
    names = [task.name for task in request.tasks]
    assert sorted(names) == sorted(set(names))
    assert {"math", "arc", "piqa"} <= set(names)


def test_chat_template_kwargs_of_pool_and_policy_are_used(tmp_path: Path) -> None:
    pool = tmp_path / "p.yaml"
    pool.write_text(
        "policies:\n  - {name: a, model: 'tiny:ada', trainer: {chat_template_kwargs: {think: false}}}\n"
        "  - {name: b, model: 'tiny:bob'}\ntrainer: {chat_template_kwargs: {think: true}}\n"
    )
    request = plan_evaluation(EvalRequest(pool=str(pool), limit=1))
    assert [model.template for model in request.models] == [{"think": False}, {"think": True}]


@pytest.mark.slow
def test_tokenizer_without_eos_is_evaluated(cli_here: Cli, real_data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(real_data / "models" / "stories260K", tmp_path / "noeos")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    for key in ("eos_token", "pad_token"):
        config.pop(key, None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    (copy / "special_tokens_map.json").unlink(missing_ok=True)
    result = cli_here(
        "eval", "--model", copy, "--limit", "2", "--max-new-tokens", "4", "--engine", "transformers", "--json"
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["models"][str(copy)]["n"] == 2


@pytest.mark.parametrize("command", [["eval"], ["tasks", "show"], ["complementarity"], ["paper", "channels"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mutualrl", *command, "--help"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    modules = imported(result.stderr)
    assert not modules & (HEAVY | {"pyarrow", "numpy", "datasets", "matplotlib", "pandas"})
    assert len(modules) < 700  # currently 530


def test_facets_and_rows_stay_with_their_prompt(cli_here: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"problem": f"{a}+{a}", "answer": str(a), "subject": f"s{a % 2}", "level": a % 3, "unique_id": f"u{a}"}
        for a in range(9)
    ]
    write(tmp_path / "m.jsonl", *rows)
    result = cli_here(
        "eval",
        "--model",
        "tiny:ada",
        "--suite",
        "math",
        "--data",
        "m.jsonl",
        "--max-new-tokens",
        "2",
        "--engine",
        "transformers",
        "--json",
    )
    math = json.loads(result.stdout)["models"]["tiny:ada"]["tasks"]["math"]
    assert {name: group["n"] for name, group in math["groups"].items()} == {"s0": 5, "s1": 4}
    assert {name: group["n"] for name, group in math["facets"]["level"].items()} == {"0": 3, "1": 3, "2": 3}


def test_hanging_reward_ends_the_evaluation_and_is_named(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import time\n\ndef asks(completions, **kwargs):\n    try:\n        time.sleep(9999)\n"
        "    except Exception:\n        time.sleep(9999)\n    return [1.0 for _ in completions]\n"
    )
    pool = "policies: [{name: ada, model: 'tiny:ada'}]\ntask: {name: arithmetic, reward: 'judge.py:asks'}\n"
    (tmp_path / "pool.yaml").write_text(pool)
    arguments = ("--limit", "4", "--max-new-tokens", "4", "--engine", "transformers", "--step-timeout", "0.5")
    result = cli_here("eval", "--pool", "pool.yaml", *arguments)
    assert result.returncode == 1, result.stderr
    assert "judge.py:asks: no progress for 0.5 s" in result.stderr
