"""What the start of a run refuses, a dry run refuses, too; files that users name are read without blocking."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from conftest import Cli
from mutualrl.recipes.starter import REWARD as REWARD_FILE

ROWS = [{"question": f"What is {i} plus 1?", "answer": str(i + 1), "deep": {"truth": str(i + 1)}} for i in range(64)]
TEMPLATE = "task.template={question}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


REFUSED = {
    "missing data": (("--data", "absent.jsonl"), 2, "data file not found"),
    "another field": (
        ("--data", "rows.jsonl"),
        2,
        "no field 'prompt' (found: answer, deep, question); if another field",
    ),
    "missing answer": (("--data", "rows.jsonl", "--set", TEMPLATE, "--set", "task.answer=x"), 2, "no field 'x'"),
    "too few rows": (("--data", "rows.jsonl", "--set", TEMPLATE, "--set", "round.prompts=320"), 2, "a round needs"),
    "long prompts": (
        ("--data", "rows.jsonl", "--set", TEMPLATE, "--set", "task.max_prompt_tokens=2"),
        2,
        "prompts is within task.max_prompt_tokens (2)",
    ),
    "directory": (("--data", "rows.jsonl", "--set", TEMPLATE, "--run-dir", "rows.jsonl/run"), 2, "is not a directory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dry_run_refuses_what_the_start_refuses(cli_here: Cli, rows: Path, name: str) -> None:
    arguments, code, message = REFUSED[name]
    command = ("train", "--regime", "grpo", "--pool", "tiny", "--task", "dataset", *arguments)
    for extra in (("--dry-run",), ("--dry-run", "--json")):
        result = cli_here(*command, *extra)
        assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert json.loads(result.stdout)["error"]["exit_code"] == code


def test_dry_run_accepts_nested_answers_and_templates_as_typed(cli_here: Cli, rows: Path) -> None:
    settings = ("--set", TEMPLATE, "--set", "task.answer=deep.truth", "--set", "round.prompts=32")
    result = cli_here("train", "--task", "dataset", "--data", rows, *settings, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["recipe"]["task"]["template"] == "{question}"


def test_compressed_and_tab_separated_rows_are_read(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(rows.read_bytes()))
    (tmp_path / "t.tsv").write_text("question\tanswer\n" + "".join(f"{r['question']}\t{r['answer']}\n" for r in ROWS))
    for name in ("z.jsonl.gz", "t.tsv"):
        shown = cli_here("tasks", "show", "dataset", "--data", name, "--template", "{question}", "--json")
        assert json.loads(shown.stdout)["n"] == 64, shown.stderr
    (tmp_path / "broken.jsonl.gz").write_bytes(b"not gzip")
    assert "cannot be read" in cli_here("tasks", "show", "dataset", "--data", "broken.jsonl.gz").stderr


@pytest.mark.parametrize("name", ["pipe.csv", "pipe.tsv", "pipe.jsonl", "pipe.parquet", "pipe.jsonl.gz"])
def test_fifo_is_refused_without_waiting(cli_here: Cli, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    result = cli_here("tasks", "show", "dataset", "--data", name)
    assert (result.returncode, "is a FIFO, a device or a socket" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("name", ["all", "run.json", "latest.json", "con", "nul", "com1.x", "a."])
def test_names_that_collide_are_refused(cli_here: Cli, name: str) -> None:
    pool = f"policies=[{{name: '{name}', model: 'tiny:ada'}}, {{name: bob, model: 'tiny:bob'}}]"
    result = cli_here("train", "--set", pool, "--dry-run")
    assert (result.returncode, "choose another name" in result.stderr) == (2, True), result.stderr


def test_init_names_the_columns_of_the_data_and_takes_them(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    two = ("--model", "tiny:ada", "--model", "tiny:bob", "--max-completion-length", "20", "--yes")
    result = cli_here("init", "p", *two, "--data", rows)
    assert result.returncode == 2
    assert "no column 'prompt'; they have question, answer, deep: add --prompt-column question" in result.stderr
    result = cli_here("init", "p", *two, "--data", rows, "--prompt-column", "question")
    assert result.returncode == 0, result.stderr
    assert 'template: "{question}"' in (tmp_path / "p" / "pool.yaml").read_text()
    names: dict[str, object] = {}
    exec((tmp_path / "p" / "reward.py").read_text(), names)
    reward = names["reward"]
    assert reward(["it is 15", "5", "$1,234.0", "x"], answer=["5", "5", "1234", "7"]) == [0, 1, 1, 0]  # type: ignore[operator]
    assert reward(["so\nParis.", "Paris, not Rome"], answer=["paris", "Rome"]) == [1, 0]  # type: ignore[operator]


def test_json_command_without_its_object_fails(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import sys\nprint('loading')\nsys.exit(0)\ndef f(completions, **_): return []\n")
    settings = ("--task", "dataset", "--data", rows, "--set", TEMPLATE, "--set", "task.reward=r.py:f")
    result = cli_here("train", *settings, "--set", "round.prompts=32", "--dry-run", "--json")
    assert json.loads(result.stdout)["error"]["message"].endswith("called sys.exit(0)")
    assert result.returncode == 2


REWARDS = """
import os
def none(completions, **_): return [None] * len(completions)
def aborts(completions, **_): os.abort()
def loops(completions, **_):
    while True:
        try:
            while True: pass
        except BaseException: pass
"""


def pool(tmp_path: Path, function: str) -> str:
    (tmp_path / "rw.py").write_text(REWARDS)
    task = f"task: {{name: dataset, data: rows.jsonl, reward: 'rw.py:{function}', template: '{{question}}'}}"
    (tmp_path / "pool.yaml").write_text(
        f"policies: [{{name: ada, model: 'tiny:ada'}}, {{name: bob, model: 'tiny:bob'}}]\n{task}\n"
    )
    return "pool.yaml"


def test_rewards_of_none_are_never_shown_as_zero(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    name = pool(tmp_path, "none")
    plan = cli_here("train", "--pool", name, "--set", "round.prompts=32", "--dry-run", "--json")
    trials = json.loads(plan.stdout)["rewards"]["ada"]
    assert {reward for trial in trials for reward in trial["rewards"]} == {None}
    shown = cli_here("train", "--pool", name, "--set", "round.prompts=32", "--dry-run").stdout
    assert "no reward, no reward" in shown
    evaluated = cli_here("eval", "--pool", name, "--limit", "2", "--json")
    error = json.loads(evaluated.stdout)["error"]
    assert (evaluated.returncode, error["kind"]) == (1, "reward")
    assert "no completion of task 'dataset' has a reward" in error["message"]


@pytest.mark.extended
@pytest.mark.slow
def test_reward_that_aborts_is_named_by_every_command(cli: Cli, rows: Path, tmp_path: Path) -> None:
    name = pool(tmp_path, "aborts")
    small = ("--prompts", "2", "--samples", "1", "--max-new-tokens", "2")
    for command in (("eval", "--pool", name, "--limit", "2"), ("complementarity", "--pool", name, *small)):
        result = cli(*command)
        assert result.returncode == (1 if command[0] == "eval" else -6)
        assert 'rw.py", line 4 in aborts' in result.stderr, result.stderr
    sizes = ("round.prompts=4", "trainer.per_device_train_batch_size=16", "run.validation_limit=4")
    settings = [word for size in (*sizes, "trainer.num_generations=4") for word in ("--set", size)]
    trained = cli(
        "train", "--regime", "sgt", "--pool", name, "--steps", "1", *settings, "--no-report", "--run-dir", "r"
    )
    assert trained.returncode == 1, trained.stderr
    assert "reward function aborts ended its process (exit code 134)" in trained.stderr
    assert "Restarting" not in trained.stderr


def test_reward_that_never_returns_ends_a_diagnostic_by_name(cli: Cli, rows: Path, tmp_path: Path) -> None:
    name = pool(tmp_path, "loops")
    with (tmp_path / name).open("a") as file:
        file.write("run: {step_timeout: 1.0}\n")
    result = cli("complementarity", "--pool", name, "--prompts", "2", "--samples", "1", "--max-new-tokens", "2")
    assert "rw.py:loops: no progress for 1 s" in result.stderr
    assert result.returncode == 1


def test_reward_is_imported_before_any_model_is_sampled(cli_here: Cli, rows: Path, tmp_path: Path) -> None:
    name = pool(tmp_path, "none")
    (tmp_path / "rw.py").write_text("import sys\nsys.exit(0)\n")
    result = cli_here("complementarity", "--pool", name, "--prompts", "2", "--samples", "1", "--max-new-tokens", "2")
    assert (result.returncode, "called sys.exit(0)" in result.stderr) == (2, True)
    assert "sampling" not in result.stderr


def test_dry_run_refuses_a_placement_that_the_recipes_hardware_cannot_have(cli_here: Cli) -> None:
    result = cli_here(
        "train",
        "--regime",
        "sgt",
        "--pool",
        "tiny",
        "--set",
        "hardware.gpus=1",
        "--set",
        "launch.share_gpus=false",
        "--dry-run",
    )
    assert (result.returncode, "2 policies need at least 2 GPUs" in result.stderr) == (4, True)
    assert (
        cli_here("train", "--regime", "sgt", "--pool", "tiny", "--set", "hardware.gpus=2", "--dry-run").returncode == 0
    )


def test_dry_run_names_models_that_are_neither_here_nor_to_be_had(cli_here: Cli) -> None:
    result = cli_here("train", "--pool", "tiny", "--set", "policies.ada.model=no/such", "--dry-run", "--json")
    assert (
        "the model 'no/such' of policy 'ada' (HF_HUB_OFFLINE is set)"
        in json.loads(result.stdout)["missing_requirements"]
    )


def test_run_directory_that_not_even_root_can_make_is_refused(cli_here: Cli) -> None:
    result = cli_here("train", "--pool", "tiny", "--run-dir", "/proc/x", "--dry-run")
    assert (result.returncode, "/proc is not writable" in result.stderr) == (2, True)


@pytest.mark.parametrize("columns", ["0", "1", "", "x", "-5"])
def test_width_that_cannot_be_is_not_believed(cli: Cli, columns: str) -> None:
    result = cli("nosuch", COLUMNS=columns)
    assert result.returncode == 2
    assert "No such command" in " ".join(result.stderr.split())


def test_narrow_terminal_gets_complete_lines(cli_here: Cli) -> None:
    shown = cli_here("recipes", "ls", COLUMNS="20").stdout
    assert "\u2026" not in shown and "..." not in shown
    plan = cli_here("train", "--pool", "tiny", "--dry-run", COLUMNS="20").stdout
    assert "policy: ada" in plan.splitlines()


def test_dry_run_says_that_a_reward_tells_nothing_apart_and_tries_every_type_of_answer(
    cli_here: Cli, tmp_path: Path
) -> None:
    answers: list[object] = ["1", "2", 3, "so\n4"]
    rows = [{"prompt": f"{n}?", "answer": answers[n % 4] if n < 40 else "1"} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rw.py").write_text(
        "def half(completions, **_): return [0.5] * len(completions)\n"
        "def strips(completions, answer, **_): return [float(a.strip() in c) for a, c in zip(answer, completions)]\n"
    )
    command = ("train", "--pool", "tiny", "--task", "dataset", "--data", "rows.jsonl", "--dry-run")
    plan = json.loads(cli_here(*command, "--set", "task.reward=rw.py:half", "--json").stdout)
    assert len(plan["rewards"]["ada"][0]["rewards"]) == 4  # the first two rows, an integer, several lines
    assert "the reward is 0.5 for every completion that was tried, right answers and no text alike" in plan["notes"]
    late = cli_here(*command, "--set", "task.reward=rw.py:strips")
    assert late.returncode != 0
    assert "'int' object has no attribute 'strip'" in late.stderr


def test_generated_reward_reads_the_last_line_of_answers_with_several() -> None:
    names: dict[str, object] = {}
    exec(REWARD_FILE, names)
    reward = names["reward"]
    steps = "Step one: ...\nThe result is\n14"
    given = ["it is 14", "\\boxed{14}", steps, "15", "42", "x\nParis."]
    expected = [steps, steps, steps, steps, "21*2=42\n#### 42", "The capital\nParis"]
    assert reward(given, answer=expected) == [1, 1, 1, 0, 1, 1]  # type: ignore[operator]
