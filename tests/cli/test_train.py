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
    """Run to the end one run of the README's command, at a few steps."""
    import subprocess
    import sys

    directory = tmp_path_factory.mktemp("first")
    done = subprocess.run(
        [sys.executable, "-m", "mutualrl", "train", "--regime", "sgt", "--pool", "tiny", "--steps", str(STEPS)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "Greedy accuracy on held-out arithmetic, before -> after training\n(sgt, 4 steps, seed 0)\n" in done.stdout
    (result,) = (directory / "runs").iterdir()
    return result


def test_a_run_leaves_what_it_promises(run: Path) -> None:
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


def test_the_policies_start_complementary(run: Path) -> None:
    before = {n: p["initial_validation"]["by_group"] for n, p in read(run / "summary.json")["policies"].items()}
    assert before["ada"]["+"] >= 0.5 and before["ada"]["*"] <= 0.2
    assert before["bob"]["*"] >= 0.5 and before["bob"]["+"] <= 0.2


def test_nothing_in_a_run_is_a_pickle(run: Path) -> None:
    """Checkpoints have torch's files, too: each can be read as tensors and plain values alone."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    plain = {".json", ".jsonl", ".yaml", ".parquet", ".safetensors", ".log", ".jinja", ".lock", ".md"}
    for path in run.rglob("*"):
        if not path.is_file():
            continue
        assert path.read_bytes()[:2] != b"\x80\x04"
        if path.suffix in {".pt", ".pth"}:
            assert path.parent.parent.name == "checkpoints"
            with safe_globals():
                torch.load(path, weights_only=True)
        else:
            assert path.suffix in plain or path.name == ".node-0.lock", path


def test_the_exchange_is_readable_as_it_lies(run: Path) -> None:
    table = ds.dataset(sorted((run / "exchange").glob("*/*.parquet"))).to_table().to_pandas()
    assert len(table) == 2 * STEPS * 128
    assert set(table["policy"]) == {"ada", "bob"}
    published = table["y_text"].notna()
    assert (published == (table["reward"] > 0.8)).all()  # SGT publishes the text of successes alone
    assert table["token_ids"].isna().all()
    by_round = table.groupby(["round", "policy"])["prompt_id"].agg(lambda ids: tuple(sorted(set(ids)))).unstack()
    assert (by_round["ada"] == by_round["bob"]).all()  # the identical batch, round by round


@pytest.mark.extended
def test_two_policies_never_draw_the_same_noise(tiny: dict[str, Path], cli: Cli, tmp_path: Path) -> None:
    """Two policies of one and the same model, seed and prompts answer differently."""
    (tmp_path / "twins.yaml").write_text('policies: [{name: a, model: "tiny:ada"}, {name: b, model: "tiny:ada"}]\n')
    done = cli(
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
    )
    assert done.returncode == 0, done.stderr
    table = ds.dataset(sorted((tmp_path / "r" / "exchange").glob("*/*.parquet"))).to_table().to_pandas()
    texts = {name: list(rows["y_text"]) for name, rows in table.groupby("policy")}
    assert texts["a"] != texts["b"]
    prompts = {name: list(rows["prompt_id"]) for name, rows in table.groupby("policy")}
    assert prompts["a"] == prompts["b"]


def test_the_same_command_gives_the_same_weights_and_summary(run: Path, cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "train", "--regime", "sgt", "--pool", "tiny", "--steps", STEPS, "--run-dir", tmp_path / "again", "--json"
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary.pop("run_dir") == str(tmp_path / "again")
    assert (
        without_times(summary)
        == without_times(read_checksummed(run / "summary.json", root=run))
        == without_times(read_checksummed(tmp_path / "again" / "summary.json", root=tmp_path / "again"))
    )
    assert "dir:" not in (tmp_path / "again" / "recipe.yaml").read_text()  # it can be run again as it lies
    for name in ("ada", "bob"):
        files = [root / "policies" / name / "model" / "model.safetensors" for root in (run, tmp_path / "again")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_the_resolved_recipe_runs_again_as_it_lies(run: Path, cli: Cli, tmp_path: Path) -> None:
    shutil.copy(run / "recipe.yaml", tmp_path / "recipe.yaml")
    done = cli("train", "recipe.yaml", "--run-dir", "again", "--json")
    assert done.returncode == 0, done.stderr
    assert without_times(json.loads(done.stdout))["policies"] == without_times(read(run / "summary.json"))["policies"]


def test_eval_of_the_run_agrees_with_its_final_validation(run: Path, cli: Cli) -> None:
    done = cli("eval", "--run", run, "--suite", "arithmetic", "--json")
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    for name, policy in read(run / "summary.json")["policies"].items():
        assert models[name]["by_group"] == policy["validation"]["by_group"]
        assert models[name]["n"] == 64
    assert read(run / "evaluations" / "arithmetic.json")["models"] == models
    assert f"saved as {run / 'evaluations' / 'arithmetic.json'}" in done.stderr
    shutil.rmtree(run / "evaluations")
    (run / "evaluations").write_text("")  # nothing can be written there
    again = cli("eval", "--run", run, "--suite", "arithmetic", "--json")
    assert (again.returncode, json.loads(again.stdout)["models"]) == (0, models)
    assert "not saved in the run" in again.stderr
    (run / "evaluations").unlink()


@pytest.mark.extended
def test_files_in_the_user_s_directory_are_not_imported(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    for name in ("torch", "argparse", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    (tmp_path / "one.yaml").write_text('policies: [{name: ada, model: "tiny:ada"}]\n')
    done = cli("train", "--regime", "grpo", "--pool", "one.yaml", "--steps", "1", "--run-dir", "r", PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_weights_that_cannot_be_read_end_with_4_and_the_policy_s_name(
    cli: Cli, tiny: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny["ada"], tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    (tmp_path / "p.yaml").write_text("policies: [{name: a, model: ./broken}]\n")
    done = cli("train", "--regime", "grpo", "--pool", "p.yaml", "--run-dir", "r")
    assert done.returncode == 4
    assert "policy 'a'" in done.stderr
    assert "cannot be loaded" in done.stderr


@pytest.mark.extended
def test_regime_grpo_rescues_nothing_and_exchanges_nothing(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    strange = "[/red] a\nb: ["  # Rich markup, and a newline that must not become a key of recipe.yaml
    done = cli("train", "--regime", "grpo", "--pool", "tiny", "--steps", "2", "--run-dir", strange)
    assert done.returncode == 0, done.stderr
    summary = read(tmp_path / strange / "summary.json")
    assert [p["rescued_pairs"] for p in summary["policies"].values()] == [0, 0]
    assert not list((tmp_path / strange / "exchange").glob("*/*.parquet"))


def test_regime_grpo_is_what_a_plain_trl_script_computes(cli: Cli, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Byte for byte, from another process: the model of a run against GRPOTrainer with the policy's seeds."""
    import torch
    from safetensors.torch import load_file
    from transformers import set_seed
    from trl import GRPOTrainer

    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.recipes import Request, resolve
    from mutualrl.seeds import policy_seed
    from mutualrl.tasks import TaskSource, get_task
    from mutualrl.tasks.boxed import boxed_reward
    from mutualrl.training.data import as_dataset
    from training_harness import config

    done = cli("train", "--regime", "grpo", "--pool", "tiny", "--steps", "3", "--seed", "5", "--run-dir", "r")
    assert done.returncode == 0, done.stderr
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
    saved = load_file(tmp_path / "r" / "policies" / "bob" / "model" / "model.safetensors")
    own_items = trainer.model.state_dict()
    assert saved.keys() == own_items.keys()
    assert all(torch.equal(saved[name], own_items[name]) for name in saved)


@pytest.mark.extended
def test_a_hub_model_that_cannot_be_had_ends_with_4_and_its_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text("policies: [{name: a, model: nobody/nothing}]\n")
    done = cli("train", "--regime", "grpo", "--pool", "hub.yaml", "--run-dir", "r", HF_HUB_OFFLINE="1")
    assert done.returncode == 4
    assert "nobody/nothing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.extended
def test_real_models_on_real_mathematics(cli: Cli, real_data: Path, tmp_path: Path) -> None:
    """Two pretrained models with different SentencePiece vocabularies; they solve nothing, and that is fine."""
    models = real_data / "models"
    (tmp_path / "real.yaml").write_text(
        f"policies:\n  - {{name: stories, model: {models / 'stories260K'}}}\n  - {{name: baby, model: {models / 'babyllama-tok361'}}}\n"
    )
    done = cli(
        "train",
        "--regime",
        "sgt",
        "--pool",
        "real.yaml",
        "--task",
        "math",
        "--data",
        real_data / "math" / "math_train.jsonl",
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
    assert done.returncode == 0, done.stderr
    assert all(
        p["validation"]["accuracy"] == 0 and p["steps"] == 3 for p in json.loads(done.stdout)["policies"].values()
    )
    scored = cli(
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
    assert scored.returncode == 0, scored.stderr
    (result,) = json.loads(scored.stdout)["models"].values()
    assert (result["n"], result["accuracy"]) == (8, 0.0)


@pytest.mark.extended
def test_validation_leaves_training_as_it_is(cli: Cli, tmp_path: Path) -> None:
    weights = []
    for all_items in (0, 1):
        done = cli(
            "train",
            "--regime",
            "prp",
            "--pool",
            "tiny",
            "--steps",
            "3",
            "--run-dir",
            tmp_path / f"v{all_items}",
            "--set",
            f"run.validate_every={all_items}",
        )
        assert done.returncode == 0, done.stderr
        weights.append((tmp_path / f"v{all_items}" / "policies" / "ada" / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    lines = (tmp_path / "v1" / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()
    assert ["validation" in json.loads(line) for line in lines] == [True, True, False]  # the last is the run's own
