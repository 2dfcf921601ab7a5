from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from conftest import PATIENCE, Cli
from mutualrl.storage.files import read_checksummed

pytestmark = pytest.mark.slow
STEPS = 4


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not k.endswith("seconds")}
    return value


@pytest.fixture(scope="module")
def run(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of the README's command with few steps."""
    import subprocess
    import sys

    directory = tmp_path_factory.mktemp("first")
    result = subprocess.run(
        [sys.executable, "-m", "mutualrl", "train", "--regime", "sgt", "--pool", "tiny", "--steps", str(STEPS)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 0, result.stderr
    assert "Greedy accuracy on held-out arithmetic, before -> after training\n(sgt, 4 steps, seed 0)\n" in result.stdout
    (run_dir,) = (directory / "runs").iterdir()
    return run_dir


def test_run_directory_has_the_documented_content(run: Path) -> None:
    info = read(run / "run.json")
    assert info["seed"] == 0
    assert {"python", "torch", "trl", "transformers", "mutualrl"} <= set(info["versions"])
    assert {"data_sha256", "prompts_per_round", "rollouts_per_prompt", "seed"} <= set(info["fingerprint"])
    summary = read(run / "summary.json")
    assert (summary["regime"], summary["seed"]) == ("sgt", 0)
    assert summary["seconds"] > 0
    assert set(summary["policies"]) == {"ada", "bob"}
    for name, policy in summary["policies"].items():
        assert policy["steps"] == STEPS
        for key in ("initial_validation", "validation"):
            assert set(policy[key]["by_group"]) == {"+", "*"}
            assert 0 <= policy[key]["accuracy"] <= 1
        files = run / "policies" / name
        lines = [json.loads(line) for line in (files / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert all(
            {"loss", "reward", "grad_norm", "sgt/gate_rate", "see/wait_seconds", "see/bytes"} <= set(line)
            for line in lines
        )
        assert policy["rescued_pairs"] == sum(line["sgt/pairs"] for line in lines) > 0
        assert (files / "model" / "model.safetensors").is_file()
        assert (files / "logs").is_dir()


def test_policies_start_complementary(run: Path) -> None:
    before = {n: p["initial_validation"]["by_group"] for n, p in read(run / "summary.json")["policies"].items()}
    assert before["ada"]["+"] >= 0.5 and before["ada"]["*"] <= 0.2
    assert before["bob"]["*"] >= 0.5 and before["bob"]["+"] <= 0.2


def test_run_directory_contains_no_pickle(run: Path) -> None:
    """Checkpoints also have torch's files, which load as tensors and plain values only."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    safe_suffixes = {".json", ".jsonl", ".yaml", ".parquet", ".safetensors", ".log", ".jinja", ".lock", ".md"}
    for path in run.rglob("*"):
        if not path.is_file():
            continue
        assert path.read_bytes()[:2] != b"\x80\x04"
        if path.suffix in {".pt", ".pth"}:
            assert path.parent.parent.name == "checkpoints"
            with safe_globals():
                torch.load(path, weights_only=True)
        else:
            assert path.suffix in safe_suffixes or path.name == ".node-0.lock", path


def test_exchange_is_readable_as_a_parquet_dataset(run: Path) -> None:
    table = ds.dataset(sorted((run / "exchange").glob("*/*.parquet"))).to_table().to_pandas()
    assert len(table) == 2 * STEPS * 128
    assert set(table["policy"]) == {"ada", "bob"}
    published = table["y_text"].notna()
    assert (published == (table["reward"] > 0.8)).all()  # SGT publishes only the text of successes
    assert table["token_ids"].isna().all()
    by_round = table.groupby(["round", "policy"])["prompt_id"].agg(lambda ids: tuple(sorted(set(ids)))).unstack()
    assert (by_round["ada"] == by_round["bob"]).all()  # the identical batch, round by round


@pytest.mark.extended
def test_policies_with_the_same_seed_sample_differently(tiny: dict[str, Path], cli: Cli, tmp_path: Path) -> None:
    """Two policies with the same model, seed and prompts sample different completions. Files in the working directory
    are not imported."""
    for name in ("torch", "argparse", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    (tmp_path / "twins.yaml").write_text('policies: [{name: a, model: "tiny:ada"}, {name: b, model: "tiny:ada"}]\n')
    result = cli(
        "train",
        "--regime",
        "sgt",
        "--pool",
        "twins.yaml",
        "--steps",
        "1",
        "--run-dir",
        "r",
        "--set",
        "trainer.max_completion_length=20",
        "--set",
        "run.publish=full",
        PYTHONSAFEPATH="1",
    )
    assert result.returncode == 0, result.stderr
    table = ds.dataset(sorted((tmp_path / "r" / "exchange").glob("*/*.parquet"))).to_table().to_pandas()
    texts = {name: list(rows["y_text"]) for name, rows in table.groupby("policy")}
    assert texts["a"] != texts["b"]
    prompts = {name: list(rows["prompt_id"]) for name, rows in table.groupby("policy")}
    assert prompts["a"] == prompts["b"]


def test_same_command_gives_the_same_weights_and_summary(run: Path, cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "train", "--regime", "sgt", "--pool", "tiny", "--steps", STEPS, "--run-dir", tmp_path / "again", "--json"
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary.pop("run_dir") == str(tmp_path / "again")
    assert (
        without_times(summary)
        == without_times(read_checksummed(run / "summary.json", root=run))
        == without_times(read_checksummed(tmp_path / "again" / "summary.json", root=tmp_path / "again"))
    )
    assert "dir:" not in (tmp_path / "again" / "recipe.yaml").read_text()  # it can be rerun unchanged
    for name in ("ada", "bob"):
        files = [root / "policies" / name / "model" / "model.safetensors" for root in (run, tmp_path / "again")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_resolved_recipe_reproduces_the_run(run: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copy(run / "recipe.yaml", tmp_path / "recipe.yaml")
    result = cli("train", "recipe.yaml", "--run-dir", "again", "--json")
    assert result.returncode == 0, result.stderr
    assert without_times(json.loads(result.stdout))["policies"] == without_times(read(run / "summary.json"))["policies"]


def test_eval_of_the_run_agrees_with_its_final_validation(run: Path, cli_here: Cli) -> None:
    result = cli_here("eval", "--run", run, "--suite", "arithmetic", "--json")
    assert result.returncode == 0, result.stderr
    models = json.loads(result.stdout)["models"]
    for name, policy in read(run / "summary.json")["policies"].items():
        assert models[name]["by_group"] == policy["validation"]["by_group"]
        assert models[name]["n"] == 64
    assert read(run / "evaluations" / "arithmetic.json")["models"] == models
    assert f"saved as {run / 'evaluations' / 'arithmetic.json'}" in result.stderr
    initial = cli_here("eval", "--run", run, "--suite", "arithmetic", "--initial", "--json")
    assert initial.returncode == 0, initial.stderr
    for name, policy in read(run / "summary.json")["policies"].items():
        by_group = json.loads(initial.stdout)["models"][name]["by_group"]
        assert by_group == policy["initial_validation"]["by_group"]
    assert read(run / "evaluations" / "arithmetic.initial.json")["initial"] is True
    assert read(run / "evaluations" / "arithmetic.json")["models"] == models
    shutil.rmtree(run / "evaluations")
    (run / "evaluations").write_text("")  # nothing can be written there
    again = cli_here("eval", "--run", run, "--suite", "arithmetic", "--json")
    assert (again.returncode, json.loads(again.stdout)["models"]) == (0, models)
    assert "not saved in the run" in again.stderr
    (run / "evaluations").unlink()


@pytest.mark.extended
def test_unreadable_weights_exit_with_4_and_name_the_policy(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tiny["ada"], tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    (tmp_path / "p.yaml").write_text("policies: [{name: a, model: ./broken}]\n")
    result = cli("train", "--regime", "grpo", "--pool", "p.yaml", "--run-dir", "r")
    assert result.returncode == 4
    assert "policy 'a'" in result.stderr
    assert "cannot be read" in result.stderr


def test_regime_grpo_equals_a_plain_trl_script(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Compare a run's model bit for bit with that of GRPOTrainer in another process, with the policy's seeds."""
    import torch
    from safetensors.torch import load_file
    from transformers import set_seed
    from trl import GRPOTrainer

    from mutualrl.adapter.data import as_dataset
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.recipes import Request, resolve
    from mutualrl.seeds import policy_seed
    from mutualrl.tasks import TaskSource, get_task
    from mutualrl.tasks.boxed import boxed_reward
    from training_harness import config

    strange = "[/red] a\nb: ["  # Rich markup, and a newline that must not become a key of recipe.yaml
    result = cli("train", "--regime", "grpo", "--pool", "tiny", "--steps", "3", "--seed", "5", "--run-dir", strange)
    assert result.returncode == 0, result.stderr
    summary = read(tmp_path / strange / "summary.json")  # grpo neither rescues nor exchanges
    assert [p["rescued_pairs"] for p in summary["policies"].values()] == [0, 0]
    assert not list((tmp_path / strange / "exchange").glob("*/*.parquet"))
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(tiny["bob"]))
    keys = resolve(Request(pool="tiny")).trainer
    trainer = GRPOTrainer(
        model=str(tiny["bob"]),
        reward_funcs=boxed_reward,
        processing_class=tokenizer,
        args=config(tmp_path / "plain", **{**keys, "max_steps": 3, "seed": 5}),
        train_dataset=as_dataset(get_task("arithmetic").read("train", TaskSource(seed=5)).prompts, tokenizer),
    )
    set_seed(policy_seed(5, "bob", 0))
    trainer.train()
    saved = load_file(tmp_path / strange / "policies" / "bob" / "model" / "model.safetensors")
    expected = trainer.model.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.extended
def test_unavailable_hub_model_exits_with_4_and_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text("policies: [{name: a, model: nobody/nothing}]\n")
    result = cli("train", "--regime", "grpo", "--pool", "hub.yaml", "--run-dir", "r", HF_HUB_OFFLINE="1")
    assert result.returncode == 4
    assert "nobody/nothing" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.release
def test_real_models_on_real_mathematics(cli: Cli, cli_here: Cli, real_data: Path, tmp_path: Path) -> None:
    """Two pretrained models with different SentencePiece vocabularies; they are not expected to solve any problem."""
    models = real_data / "models"
    lines = (real_data / "math" / "math_train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "math.jsonl").write_text("".join(lines[:400]))
    (tmp_path / "real.yaml").write_text(
        f"policies:\n  - {{name: stories, model: {models / 'stories260K'}}}\n  - {{name: baby, model: {models / 'babyllama-tok361'}}}\n"
    )
    result = cli(
        "train",
        "--regime",
        "sgt",
        "--pool",
        "real.yaml",
        "--task",
        "math",
        "--data",
        "math.jsonl",
        "--steps",
        "3",
        "--run-dir",
        "r",
        "--json",
        "--set",
        "trainer.max_completion_length=16",
        "--set",
        "round.prompts=2",
        "--set",
        "run.validation_limit=8",
    )
    assert result.returncode == 0, result.stderr
    assert all(
        p["validation"]["accuracy"] == 0 and p["steps"] == 3 for p in json.loads(result.stdout)["policies"].values()
    )
    evaluated = cli_here(
        "eval",
        "--model",
        tmp_path / "r" / "policies" / "stories" / "model",
        "--suite",
        "math",
        "--data",
        real_data / "math" / "math500.jsonl",
        "--limit",
        "8",
        "--max-new-tokens",
        "16",
        "--json",
    )
    assert evaluated.returncode == 0, evaluated.stderr
    (evaluation,) = json.loads(evaluated.stdout)["models"].values()
    assert (evaluation["n"], evaluation["accuracy"]) == (8, 0.0)


@pytest.mark.release
def test_validation_does_not_affect_training(cli: Cli, tmp_path: Path) -> None:
    weights = []
    for validate_every in (0, 1):
        result = cli(
            "train",
            "--regime",
            "prp",
            "--pool",
            "tiny",
            "--steps",
            "3",
            "--run-dir",
            tmp_path / f"v{validate_every}",
            "--set",
            f"run.validate_every={validate_every}",
        )
        assert result.returncode == 0, result.stderr
        weights.append(
            (tmp_path / f"v{validate_every}" / "policies" / "ada" / "model" / "model.safetensors").read_bytes()
        )
    assert weights[0] == weights[1]
    lines = (tmp_path / "v1" / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()
    assert ["validation" in json.loads(line) for line in lines] == [True, True, False]  # the run makes the last itself
