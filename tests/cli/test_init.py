"""`mutualrl init`: writes a project that trains, or nothing if something is wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from conftest import Cli
from mutualrl.cli.app import app
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.recipes.project import ProjectRequest
from mutualrl.recipes.request import Request
from mutualrl.recipes.starter import NEXT, files, named

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TWO = ("--model", "tiny:ada", "--model", "tiny:bob")
SHORT = ("--max-completion-length", "16", "--gpus", "0")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}:", "answer": str(2 * i)}) + "\n" for i in range(40)))
    return path


@pytest.fixture
def chat_model(tmp_path: Path, tiny: dict[str, Path]) -> Path:
    """Return a model with a chat template, in a directory whose name YAML and shells must quote."""
    model = tmp_path / "it's: a {model} #1"
    shutil.copytree(tiny["bob"], model)
    tokenizer = load_tokenizer(str(tiny["bob"]))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    return model


def test_user_models_data_and_reward_are_checked_shown_and_written(
    cli_here: Cli, rows: Path, chat_model: Path, tmp_path: Path
) -> None:
    options = ("--model", "ada=tiny:ada", "--model", chat_model, "--data", rows, "--reward", "own")
    result = cli_here("init", tmp_path / "project", *options, *SHORT, "--yes")
    assert result.returncode == 0, result.stderr
    for text in ("Safe: texts and traces", "training prompts", "<user>", "reward.py:reward on", "Placement on"):
        assert text in result.stdout, result.stdout
    assert result.stdout.count("--- prompt of ada, ") == 5
    few = (
        r"Note: 3 held-out prompts will hardly decide anything: one of them is 33% of the result; the data have 40 rows"
    )
    assert re.search(few, " ".join(result.stdout.split()))
    project = tmp_path / "project"
    assert sorted(path.name for path in project.iterdir()) == ["README.md", "pool.yaml", "reward.py"]
    pool = yaml.safe_load((project / "pool.yaml").read_text())
    assert [policy["model"] for policy in pool["policies"]] == ["tiny:ada", str(chat_model)]
    assert pool["policies"][1]["name"] == "it-s--a--model---1"
    assert pool["task"] == {"name": "dataset", "data": str(rows), "reward": "reward.py:reward"}
    readme = (project / "README.md").read_text()
    assert all(command in readme and command in result.stdout for command in NEXT)


@pytest.mark.extended
@pytest.mark.slow
def test_suggested_next_commands_run(cli: Cli, cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    result = cli_here("init", tmp_path, *TWO, "--data", rows, "--reward", "own", *SHORT, "--json")
    answer = json.loads(result.stdout)
    assert answer["next"] == list(NEXT)
    assert set(answer["plan"]) >= {"placement", "missing_requirements", "rewards"}
    check_arguments, train_arguments, _ = (shlex.split(command)[1:] for command in NEXT)
    result = cli(*check_arguments)  # in tmp_path
    assert result.returncode == 0, result.stderr
    assert "Recommendation:" in result.stdout
    result = cli(*train_arguments, "--steps", "1", "--set", "run.validation_limit=8")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "sgt" / "summary.json").is_file()


@pytest.mark.parametrize("name", ["pool.yaml", "reward.py", "README.md"])
def test_existing_files_are_not_overwritten(cli_here: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    result = cli_here("init", tmp_path, *TWO, "--task", "arithmetic", *SHORT, "--yes")
    assert result.returncode == 2
    assert f"already has {name}" in " ".join(result.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "found 0 models and 0 sources, expected two models or more, or one and a source"),
        (("--model", "tiny:ada"), 2, "found 1 models and 0 sources, expected two models or more"),
        (("--model", "tiny:ada", "--model", "x/ada"), 2, "two policies are named 'ada'"),
        (TWO, 2, "give --task NAME (mutualrl tasks ls), or --data FILE with your own rows"),
        ((*TWO, "--task", "arithmetic", "--data", "rows.jsonl"), 2, "--task arithmetic generates its own problems"),
        ((*TWO, "--data", "few.jsonl"), 2, "training prompts remain, a round needs 16"),
        (("--model", "~nobody-here/a", "--model", "tiny:bob", "--task", "arithmetic"), 2, "cannot be used"),
        ((*TWO, "--data", "none.jsonl"), 2, "none.jsonl"),
        ((*TWO, "--task", "no-such-task"), 2, "no-such-task"),
        (("--model", "tiny:ada", "--model", "./nowhere", "--task", "arithmetic"), 2, "model not found: './nowhere'"),
        ((*TWO, "--task", "arithmetic", "--reward", "gone.py:score"), 2, "gone.py"),
    ],
)
def test_invalid_options_are_rejected_and_write_nothing(
    cli_here: Cli, tmp_path: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    rows = [json.dumps({"prompt": f"{i}+1:", "answer": str(i + 1)}) + "\n" for i in range(8)]
    (tmp_path / "few.jsonl").write_text("".join(rows))
    result = cli_here("init", tmp_path / "new", *options, "--gpus", "0", "--yes")
    assert result.returncode == code, result.stderr
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "new").exists()


def test_keys_of_set_are_written_and_checked(cli_here: Cli, tmp_path: Path) -> None:
    table = [{"q": f"What is {i} plus 1?", "a": str(i + 1)} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"q": f"Now {i}?", "a": "1"}) + "\n" for i in range(8)))
    texts = [{"q": row["q"], "worked": f"\\boxed{{{row['a']}}}"} for row in table]
    (tmp_path / "book.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    command = ("init", "new", "--model", "tiny:ada", "--source", "book=recorded:book.jsonl", "--data", "rows.jsonl")
    flags = ("--reward", "boxed", "--gpus", "0", "--yes")
    keys = ("task.template={q}", "task.answer=a", "task.validation_data=held.jsonl", "run.steps=5")
    refused = cli_here(*command, *flags, *(part for key in keys for part in ("--set", key)))
    assert (refused.returncode, "sources.book.columns.text=COLUMN" in refused.stderr) == (2, True)
    keys = (*keys, "sources.book.columns.text=worked", "sources.book.columns.prompt=q")
    result = cli_here(*command, *flags, *(part for key in keys for part in ("--set", key)))
    assert result.returncode == 0, result.stderr
    pool = yaml.safe_load((tmp_path / "new" / "pool.yaml").read_text())
    assert pool["task"]["validation_data"] == str(tmp_path / "held.jsonl")
    assert (pool["task"]["template"], pool["run"]["steps"], pool["run"]["validate_every"]) == ("{q}", 5, 25)
    assert pool["sources"][0]["columns"] == {"text": "worked", "prompt": "q"}
    assert "100 texts, distinct in each" in result.stdout


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("./runs/lr=1e-5/a", "a"),
        ("Own/Model.B", "model.b"),
        ("x=./b", "x"),
        ("tiny:ada", "ada"),
        ("/m/\U0001f600", "policy"),
    ],
)
def test_policy_is_named_after_its_model(model: str, name: str) -> None:
    policies = named([model, "other=tiny:bob"])
    assert next(iter(policies)) == name
    project = ProjectRequest(asked=Request(models=(model, "other=tiny:bob"), task="arithmetic"))
    pool = yaml.safe_load(files(project)["pool.yaml"])
    assert [policy["model"] for policy in pool["policies"]] == [policies[name], "tiny:bob"]


def test_tokenizers_that_cannot_share_are_rejected(cli_here: Cli, tmp_path: Path, tiny: dict[str, Path]) -> None:
    endless = tmp_path / "endless"
    shutil.copytree(tiny["bob"], endless)
    tokenizer = load_tokenizer(str(tiny["bob"]))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(endless)
    options = ("--model", "tiny:ada", "--model", endless, "--task", "arithmetic", *SHORT)
    result = cli_here("init", tmp_path / "new", *options, "--yes")
    assert result.returncode == 3
    assert "has no end-of-sequence token" in " ".join(result.stderr.split())
    answer = cli_here("init", tmp_path / "new", *options, "--json")
    assert answer.returncode == 3
    assert not json.loads(answer.stdout)["safe"]
    assert not (tmp_path / "new").exists()
    assert cli_here("init", tmp_path / "new", *options, "--yes", "--no-check").returncode == 0


def test_missing_options_are_prompted_for_on_a_terminal(tmp_path: Path, rows: Path) -> None:
    terminal, child_terminal = pty.openpty()
    command = [sys.executable, "-m", "mutualrl", "init", str(tmp_path / "new"), "--max-completion-length", "16"]
    with subprocess.Popen(command, stdin=child_terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.write(terminal, f"tiny:ada\ntiny:bob\n{rows}\nown\n0\n".encode())
        output, errors = process.communicate()
    os.close(terminal)
    os.close(child_terminal)
    assert process.returncode == 0, errors
    for question in ("Model 1", "Model 2", "Data (a file", "Reward:", "GPUs"):
        assert question in errors.decode()
    assert b"Written to" in output
    assert yaml.safe_load((tmp_path / "new" / "pool.yaml").read_text())["hardware"] == {"gpus": 0}


CPUS = {"with bfloat16": {"avx512_bf16": True}, "without": {"avx512_bf16": False, "amx_bf16": False}}


@pytest.mark.parametrize(("cpu", "expected"), [("with bfloat16", {"bf16": True}), ("without", None)])
def test_large_models_train_in_bfloat16_if_the_cpu_supports_it(
    rows: Path, tmp_path: Path, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, cpu: str, expected: object
) -> None:
    large = tmp_path / "large"
    shutil.copytree(tiny["bob"], large)
    monkeypatch.setattr("mutualrl.cli.init.BF16_WEIGHTS", 170_000)  # between the two embedded models'
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: CPUS[cpu])
    options = ["--model", "tiny:ada", "--model", str(large), "--data", str(rows), "--gpus", "0", "--yes", *SHORT]
    result = CliRunner().invoke(app, ["init", str(tmp_path / "project"), *options])
    assert result.exit_code == 0, result.output
    policies = yaml.safe_load((tmp_path / "project" / "pool.yaml").read_text())["policies"]
    assert [policy.get("trainer") for policy in policies] == [None, expected]
