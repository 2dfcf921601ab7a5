"""Users' own data, reward functions and pools: any columns, any prompts, any mixture of tokenizers and templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import Cli
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.records import Completion
from mutualrl.tasks import TaskSource, get_task
from mutualrl.trajectory import Trajectory

TEMPLATES = {
    "cat": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "dan": "{% for m in messages %}{{ m['role'][0] }}= {{ m['content'] }}{% endfor %}",
}
REWARDS = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar

@dataclass
class Bonus:
    """Data classes look up their module in sys.modules."""
    size: ClassVar[float] = 0.5
    of: int = 1

async def asking(completions, **kwargs):
    """An async judge that imports a neighbouring module when it is called."""
    import asyncio
    import helper_beside_it
    await asyncio.sleep(0)
    return [Bonus.size * helper_beside_it.ONE for _ in completions]

def near(completions, answer, difficulty, log_metric=None, **kwargs):
    """Checks for the answer; needs an extra column; gives some rows no reward."""
    text = lambda c: c if isinstance(c, str) else c[0]["content"]
    log_metric("difficulty", sum(map(float, difficulty)) / len(difficulty))  # a CSV column is text
    return [None if a[-1] in "2468" else float(a in text(c)) for c, a in zip(completions, answer)]

def raises(completions, **kwargs):
    raise KeyError("no such column")

def stepping(completions, trainer_state, **kwargs):
    return [1.0 / (1 + trainer_state.global_step)] * len(completions)

def short(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["good"] * len(completions)

def leaves(completions, **kwargs):
    import os
    os._exit(0)

def nothing(completions, **kwargs):
    return [None] * len(completions)

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)
'''


@pytest.fixture
def user_files(tmp_path: Path, tiny: dict[str, Path]) -> Path:
    """Return the command's working directory with data as JSON Lines, Parquet, CSV and a saved data set; a pool
    of four with two chat templates, one without a pad token, and parts of it; reward functions."""
    prompts = get_task("arithmetic").read("train", TaskSource()).prompts[:64]
    plain = [
        {"prompt": p.text, "answer": p.answer, "difficulty": i % 3, "group": p.group} for i, p in enumerate(prompts)
    ]
    talk = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in plain]
    for name, rows in (("plain", plain), ("talk", talk)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from datasets import Dataset

    data = Dataset.from_list(plain)
    data.to_parquet(tmp_path / "plain.parquet")
    data.to_csv(tmp_path / "plain.csv")
    data.save_to_disk(tmp_path / "saved")
    for name, source in (("cat", "ada"), ("dan", "bob")):
        shutil.copytree(tiny[source], tmp_path / name)
        tokenizer = load_tokenizer(str(tiny[source]))
        tokenizer.chat_template = TEMPLATES[name]
        if name == "dan":
            tokenizer.pad_token = None
        tokenizer.save_pretrained(tmp_path / name)
    four = [
        {"name": "ada", "model": "tiny:ada"},
        {"name": "bob", "model": "tiny:bob"},
        {"name": "cat", "model": str(tmp_path / "cat")},
        {"name": "dan", "model": str(tmp_path / "dan")},
    ]
    shared: dict[str, Any] = {
        "task": "dataset",
        "round": {"prompts": 8},
        "run": {"validate_every": 0, "steps": 3},
        "trainer": {
            "num_generations": 4,
            "per_device_train_batch_size": 32,
            "max_completion_length": 20,
            "learning_rate": 5e-4,
        },
    }
    (tmp_path / "four.yaml").write_text(yaml.safe_dump({"policies": four, **shared}))
    (tmp_path / "chatty.yaml").write_text(yaml.safe_dump({"policies": four[2:], **shared}))
    for name in ("ada", "cat"):  # tests without peers start one policy
        alone = [policy for policy in four if policy["name"] == name]
        (tmp_path / f"only-{name}.yaml").write_text(yaml.safe_dump({"policies": alone, **shared}))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"policies": four[:2], **shared}))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "helper_beside_it.py").write_text("ONE = 1.0\n")
    return tmp_path


def metrics(run: Path, policy: str) -> list[dict[str, Any]]:
    lines = (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.release
@pytest.mark.slow
def test_four_policies_with_different_prompt_formats_share(cli: Cli, user_files: Path) -> None:
    result = cli(
        "train", "--regime", "prp+sgt", "--pool", "four.yaml", "--data", "plain.jsonl", "--run-dir", "run", "--json"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for policy in ("ada", "bob", "cat", "dan"):
        rows = metrics(user_files / "run", policy)
        assert len(rows) == 3
        assert all(row["see/bytes"] > 0 for row in rows)
        assert rows[0]["prp/rows"] + rows[0]["prp/unencodable"] == 3 * 32
        assert "sgt/gate_rate" in rows[0]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "pool", "regime"),
    [
        ("talk.jsonl", "chatty.yaml", ("--regime", "sgt", "--set", "regime.success_above=0.5")),
        ("plain.csv", "only-cat.yaml", ("--regime", "grpo")),
        ("saved", "only-cat.yaml", ("--regime", "grpo")),
    ],
)
def test_any_dataset_format_trains_with_a_user_reward_function(
    cli: Cli, user_files: Path, data: str, pool: str, regime: tuple[str, ...]
) -> None:
    options = ("--data", data, "--run-dir", "run", "--json", "--set", "task.reward=rewards.py:near")
    result = cli("train", *regime, "--pool", pool, *options)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = metrics(user_files / "run", "cat")
    assert {"rewards/near/mean", "difficulty", "rewards/unscorable"} <= set(rows[0])
    assert sum(row["rewards/unscorable"] for row in rows) > 0  # None is neither success nor failure
    summary = json.loads(result.stdout)["policies"]["cat"]["validation"]
    assert 0 <= summary["accuracy"] <= 1
    assert summary["no_box"] is None


@pytest.mark.extended
@pytest.mark.slow
def test_reward_function_may_be_async_and_import_when_called(cli: Cli, user_files: Path) -> None:
    result = cli(
        "train",
        "--regime",
        "grpo",
        "--pool",
        "only-ada.yaml",
        "--data",
        "plain.jsonl",
        "--run-dir",
        "run",
        "--steps",
        "1",
        "--set",
        "task.reward=rewards:asking",
        "--json",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert metrics(user_files / "run", "ada")[0]["reward"] == 0.5
    assert json.loads(result.stdout)["policies"]["ada"]["validation"]["accuracy"] == 0.5


@pytest.mark.slow
def test_wrong_number_of_rewards_is_named_in_a_script(tiny: dict[str, Path], user_files: Path, tmp_path: Path) -> None:
    from mutualrl.errors import RewardError
    from mutualrl.tasks.rewards import load_reward
    from mutualrl.training import MutualGRPOTrainer
    from training_harness import sharing, train

    shared = sharing(tmp_path / "x", "grpo-noise")
    with pytest.raises(RewardError, match="reward function short: 1 rewards for 32 completions, expected one each"):
        train(
            MutualGRPOTrainer, tiny["ada"], tmp_path / "a", shared, reward=load_reward(f"{user_files}/rewards.py:short")
        )


def test_parquet_and_jsonl_give_the_same_prompts(user_files: Path) -> None:
    rows = [
        get_task("dataset").read("train", TaskSource(data=user_files / f"plain.{kind}")).prompts
        for kind in ("parquet", "jsonl")
    ]
    assert [(p.text, p.answer, p.columns) for p in rows[0]] == [(p.text, p.answer, p.columns) for p in rows[1]]


def test_csv_labels_are_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt,answer\na,3\nb,2.5\nc,007\nd,NA\n")
    source = TaskSource(data=tmp_path / "d.csv", validation_data=tmp_path / "d.csv")
    assert [p.answer for p in get_task("dataset").read("train", source).prompts] == ["3", "2.5", "007", "NA"]


def test_columns_reach_the_reward_function_with_their_types_and_values(tiny: dict[str, Path], tmp_path: Path) -> None:
    from mutualrl.adapter.data import as_dataset
    from mutualrl.tasks.dataset import column_notes
    from mutualrl.tasks.rewarding import reward_arguments

    notes = [2**70, "book 3", 0, False, {"pages": [1, None]}, float("nan")]
    answers = [7, "x+1", 0, False, [1, 2], {"a": 1.5}]
    rows = [
        {"prompt": f"p{i}", "answer": a, "note": n, "group": i}
        for i, (a, n) in enumerate(zip(answers, notes, strict=True))
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = TaskSource(data=tmp_path / "d.jsonl", validation_data=tmp_path / "d.jsonl")
    prompts = get_task("dataset").read("train", source).prompts
    assert [p.answer for p in prompts] == ["7", "x+1", "0", "false", "[1, 2]", '{"a": 1.5}']
    assert [p.group for p in prompts] == ["0", "1", "2", "3", "4", "5"]
    tokenizer = load_tokenizer(str(tiny["ada"]))
    answered = [(prompt, Completion((), Trajectory.of_text(""), ended=True)) for prompt in prompts]
    outside = reward_arguments(answered, tokenizer)  # dry run, evaluation
    inside = list(as_dataset(prompts, tokenizer))  # training
    for received in ([*outside["answer"]], [row["answer"] for row in inside]):
        assert [(type(value), value) for value in received] == [(type(value), value) for value in answers]
    for received in ([*outside["note"]], [row["note"] for row in inside]):
        assert [(type(value), repr(value)) for value in received] == [(type(value), repr(value)) for value in notes]
    assert [row["group"] for row in inside] == [0, 1, 2, 3, 4, 5]
    assert "data column 'note' has values of several types (bool in 1 rows, dict in 1 rows" in column_notes(prompts)[1]


@pytest.mark.extended
@pytest.mark.slow
def test_several_reward_functions_are_weighted_as_in_trl(cli: Cli, user_files: Path) -> None:
    result = cli(
        "train",
        "--regime",
        "grpo",
        "--pool",
        "only-ada.yaml",
        "--data",
        "plain.jsonl",
        "--run-dir",
        "run",
        "--steps",
        "1",
        "--set",
        'task.reward=["boxed","rewards.py:near"]',
        "--set",
        "trainer.reward_weights=[1.0,0.5]",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    row = metrics(user_files / "run", "ada")[0]
    assert {"rewards/boxed_reward/mean", "rewards/near/mean"} <= set(row)


def test_dry_run_tries_the_user_reward(cli_here: Cli, user_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_files)
    options = ("train", "--pool", "four.yaml", "--data", "plain.jsonl", "--dry-run", "--set")
    rewards = json.loads(cli_here(*options, "task.reward=rewards.py:near", "--json").stdout)["rewards"]
    assert list(rewards) == ["ada", "cat"]  # one reads text, the other messages
    for trials in rewards.values():
        by_kind = {trial["completion"]: trial["rewards"] for trial in trials}
        # `near` scores odd answers only
        assert by_kind["the answer alone"] == by_kind["the answer in \\boxed{}"] == [1.0, None]
        assert by_kind["no text"] == [0.0, None]
    shown = cli_here(*options, "task.reward=rewards.py:near").stdout
    assert "rewards.py:near on the first prompts as ada sees them" in " ".join(shown.split())
    stepping = cli_here(*options, "task.reward=rewards.py:stepping", "--json")  # trainer_state exists, as in training
    assert stepping.returncode == 0, stepping.stderr
    broken = cli_here(*options, "task.reward=rewards.py:raises")
    assert broken.returncode == 1
    assert "Placement on" in broken.stdout
    assert "reward function raises: KeyError: 'no such column' (rewards.py, line" in " ".join(broken.stderr.split())


def test_dry_run_without_models_reports_that_no_reward_was_tried(
    cli_here: Cli, user_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_files)
    result = cli_here(
        "train",
        "--pool",
        "2qwen",
        "--task",
        "dataset",
        "--data",
        "plain.jsonl",
        "--dry-run",
        "--set",
        "task.reward=rewards.py:near",
        "--set",
        "round.prompts=32",
    )
    assert result.returncode == 0, result.stderr
    assert "The reward function was not tried: the models are not on this machine" in " ".join(result.stdout.split())


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("raises", 1, "reward function raises: KeyError: 'no such column' (rewards.py, line"),
        pytest.param("words", 1, "reward function words", marks=pytest.mark.extended),
    ],
)
def test_broken_reward_function_is_named(cli: Cli, user_files: Path, function: str, code: int, message: str) -> None:
    result = cli(
        "train",
        "--regime",
        "grpo",
        "--pool",
        "only-ada.yaml",
        "--data",
        "plain.jsonl",
        "--run-dir",
        "run",
        "--json",
        "--set",
        f"task.reward=rewards.py:{function}",
    )
    assert result.returncode == code, result.stderr[-2000:]
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "reward"
    assert message in error["message"]


@pytest.mark.extended
def test_exit_with_code_0_in_a_reward_function_fails_the_run(cli: Cli, user_files: Path) -> None:
    settings = ("task.reward=rewards.py:leaves", "run.max_restarts=0", "run.on_peer_loss=continue")
    assignments = [word for setting in settings for word in ("--set", setting)]
    command = ("train", "--regime", "grpo", "--pool", "only-ada.yaml", "--data", "plain.jsonl", "--run-dir", "run")
    result = cli(*command, "--json", *assignments)
    assert result.returncode == 1, result.stderr[-2000:]
    assert "reward function leaves: called os._exit(0)" in json.loads(result.stdout)["error"]["message"]
    assert not (user_files / "run" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("function", ["nan"])  # TRL turns None into NaN
def test_nan_rewards_train_nothing_and_are_counted(cli: Cli, user_files: Path, function: str) -> None:
    result = cli(
        "train",
        "--regime",
        "prp",
        "--pool",
        "two.yaml",
        "--data",
        "plain.jsonl",
        "--run-dir",
        "run",
        "--steps",
        "1",
        "--set",
        f"task.reward=rewards.py:{function}",
        "--set",
        "trainer.beta=0.0",
    )
    assert result.returncode == 0, result.stderr[-2000:]
    row = metrics(user_files / "run", "ada")[0]
    assert row["rewards/unscorable"] == 32
    assert row["grad_norm"] == 0.0


CASES = [
    (["--set", "task.reward=rewards.py:gone"], 2, "has no function 'gone'"),
    (["--set", "task.reward=absent.py:f"], 2, "no such file"),
    (["--set", "task.reward=no_such_module:f"], 2, "No module named 'no_such_module'"),
    (["--set", "task.reward=nonsense"], 2, "expected 'boxed', 'package.module:function'"),
    (["--set", "trainer.top_p=0.9", "--regime", "prp"], 2, "trainer.top_p: found 0.9, which biases the regime's"),
    (
        ["--set", "trainer.top_k=20", "--set", "trainer.use_vllm=true"],
        2,
        "TRL's correction between vLLM and the trainer",
    ),
    (["--set", "trainer.multi_objective_aggregation=normalize_then_sum", "--regime", "xgrpo"], 2, "expected 'sum_then"),
    (["--set", "trainer.use_vllm=true", "--set", "trainer.vllm_mode=server"], 2, "both use the vLLM server"),
    (["--set", "launch.processes=3"], 2, "32 completions per round do not divide"),
    pytest.param(
        ["--data", "talk.jsonl", "--pool", "only-ada.yaml", "--regime", "grpo"],
        4,
        "has no chat template, which conversational prompts need",
        marks=pytest.mark.extended,  # detected only in a worker
    ),
    (["--set", 'trainer.generation_kwargs={"top_p": 0.5}', "--regime", "prp"], 2, "generation_kwargs.top_p: found 0.5"),
    (
        ["--set", 'trainer.generation_kwargs={"typical_p": 0.5}', "--regime", "prp"],
        2,
        "trainer.generation_kwargs.typical_p: found 0.5, which biases the regime's importance ratios; expected no",
    ),
    (["--set", "lora.r=4", "--set", "lora.dropout=0.1", "--regime", "prp"], 2, "lora.dropout: found 0.1"),
    (["--set", "regime.clip=band", "--set", "trainer.loss_type=cispo", "--regime", "prp"], 2, "regime.clip: band does"),
    (["--set", "regime.clip=band", "--set", "trainer.top_entropy_quantile=0.5", "--regime", "prp"], 2, "expected 1.0"),
    (["--set", "trainer.epsilon_high=9.0", "--regime", "prp"], 2, "expected a larger delta"),
    (["--set", "lora.r=0"], 2, "lora.r: found 0"),
    (["--set", "regime.mix=2", "--regime", "xgrpo"], 2, "regime.mix: found 2"),
    (["--set", "regime.denominator=mine", "--regime", "prp"], 2, "regime.denominator: found 'mine'"),
    (["--regime", "xgpo"], 2, "did you mean 'xgrpo'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), CASES, ids=lambda value: str(value)[:60])
def test_invalid_settings_are_rejected_by_name(
    cli_here: Cli, user_files: Path, arguments: list[str], code: int, message: str
) -> None:
    data = ["--data", "plain.jsonl"] if "--data" not in arguments else []
    result = cli_here("train", "--pool", "two.yaml", *data, *arguments)
    assert result.returncode == code, result.stderr[-2000:]
    assert message in result.stderr
    assert "Traceback" not in result.stderr


ROWS = [
    ('{"prompt": "x"}', "row 1: no field 'answer'"),
    ('{"prompt": 3, "answer": "1"}', "field 'prompt': found int, expected a string or a list of messages"),
    ('{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}', "expected a 'role' of system"),
    ('{"prompt": "  ", "answer": "1"}', "is empty, expected a string"),
    ('{"prompt": "x", "answer": ""}', "an empty box would count as correct"),
    ('{"prompt": "x", "answer": null}', "field 'answer' is null"),
    ('{"prompt": "x", "answer": NaN}', "field 'answer' is nan (a missing value?)"),
    ('{"prompt": "x", "answer": -1e999}', "field 'answer' is -inf"),
    ('{"prompt": "x", "answer": "1", "image": "i"}', "column 'image' is reserved by TRL"),
    (
        '{"prompt": "x", "answer": "1", "prompt_id": "a"}\n{"prompt": "y", "answer": "1", "prompt_id": "a"}',
        "rows 1 and 2 have the same prompt_id 'a'",
    ),
]


@pytest.mark.parametrize(("row", "message"), ROWS, ids=lambda value: str(value)[:40])
def test_invalid_rows_are_named(cli_here: Cli, user_files: Path, row: str, message: str) -> None:
    (user_files / "bad.jsonl").write_text(row + "\n")
    result = cli_here("train", "--pool", "two.yaml", "--data", "bad.jsonl")
    assert result.returncode == 2
    assert message in result.stderr
