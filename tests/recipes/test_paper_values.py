"""Paper recipes against tables of the paper's values (Sections "Hyperparameters", "Policy pools")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import Cli
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import place
from mutualrl.recipes import Recipe, Request, resolve, shipped
from mutualrl.recipes.differences import by_dotted_key

PAPER = sorted(name for kind, name, _ in shipped() if kind == "paper")
EIGHT = Machine(tuple(map(str, range(8))), 96)

#: paper, Section "Hyperparameters": settings of every training run
TRAINER: dict[str, Any] = {
    "num_generations": 5,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_completion_length": 3072,
    "optim": "adamw_torch",
    "learning_rate": 1e-6,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "beta": 1e-3,
    "use_bias_correction_kl": False,  # TRL's default weights the KL estimate by the importance ratio
    "vllm_importance_sampling_correction": False,  # TRL's default drops sequences; the paper corrects nothing
    "delta": 3.0,  # VERL's dual clip
    "entropy_coef": 0.0,
    "full_determinism": True,
    "vllm_gpu_memory_utilization": 0.9,
}
#: paper, Section "Hyperparameters", last paragraph: settings of each regime
REGIME: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo-noise": {"equal_groups": "perturbed"},
    "sgt": {"weight": 0.1, "success_above": 0.8, "failure_below": 0.2},
    "xgrpo": {"mix": 0.2, "length_correction": 0.1},
    "prp": {"denominator": "peer", "clip": "ppo", "delta": 3.0, "anchor": "paper-fallback"},
}
#: paper, Table "Policy pools"
MODELS = {
    "2qwen": ["Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen3-1.7B-Base"],
    "3qwen": ["Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-4B-Base"],
    "llama-mist": ["meta-llama/Llama-3.2-3B-Instruct", "Ministral-3"],
    "qwen-phi4": ["microsoft/Phi-4-mini-instruct", "Qwen/Qwen3-4B-Base"],
}


def recipe_of(name: str) -> Recipe:
    return resolve(Request(recipe=Path("paper", name)))


@pytest.mark.parametrize("name", PAPER)
def test_trainer_settings_match_the_paper(name: str) -> None:
    recipe = recipe_of(name)
    for policy in recipe.policies:
        settings = recipe.trainer_settings(policy.name)
        assert {key: settings.get(key) for key in TRAINER} == TRAINER
        assert settings["epsilon"] == 0.2
        assert settings["vllm_enable_sleep_mode"]  # without it, vLLM's 90 % of GPU memory leaves none for training
    assert (recipe.round.prompts, recipe.round.optimizer_steps) == (1024, 4)  # four mini-batches of 256 prompts
    assert recipe.task.max_prompt_tokens == 1024
    assert recipe.run.save_every == 20 * 4  # the paper counts a round of four optimizer steps as one step
    assert recipe.hardware.gpus == 8


@pytest.mark.parametrize("name", PAPER)
def test_epochs_and_validation_match_the_paper(name: str) -> None:
    recipe = recipe_of(name)
    if name.startswith(
        "qa-"
    ):  # paper, Figure "Outcome-level transfer extends ...": at step 50, of four optimizer steps
        assert (recipe.task.name, recipe.run.steps, recipe.run.validate_every) == ("mixture", 4 * 50, 4 * 5)
    else:
        assert (recipe.task.name, recipe.run.epochs, recipe.run.validate_every) == ("math", 15, 4 * 5)
        assert recipe.run.validation_limit == 5000  # the whole test set of MATH


@pytest.mark.parametrize("name", PAPER)
def test_regime_and_its_settings_match_the_paper(name: str) -> None:
    recipe = recipe_of(name)
    regime = recipe.regime_name
    arm = name.removeprefix("qa-").removeprefix(recipe.pool or "").removeprefix("-")
    assert arm.split("-")[0] in regime.split("-")
    for policy in recipe.policies:
        settings = recipe.regime_of(policy.name).model_dump()
        expected = dict(REGIME[regime])
        if arm == "prp-naive":
            expected |= {
                "denominator": "snapshot",
                "anchor": "span",
            }  # paper, Figure "THL-aligned importance correction is required"
        assert {key: settings[key] for key in expected} == expected
        assert settings.get("teacher", "peer") == ("source" if arm == "sgt-gold" else "peer")
        assert [source.recorded for source in recipe.sources] == (["task"] if arm == "sgt-gold" else [])
        assert settings.get("pool", "matched") == ("shuffled" if arm == "xgrpo-shuffled" else "matched")


@pytest.mark.parametrize("name", PAPER)
def test_micro_batch_is_two_prompts_per_gpu_and_the_pool_fits_one_node(name: str) -> None:
    recipe = recipe_of(name)
    placement = place(recipe, EIGHT)
    used = [gpu for allocation in placement.allocations for gpu in allocation.gpus]
    assert sorted(used) == sorted(EIGHT.gpus)
    for allocation in placement.allocations:
        plan = allocation.batch
        assert plan.per_device == 2 * 5
        rows = plan.per_device * plan.micro_batches * plan.optimizer_steps * allocation.processes
        assert rows == 1024 * 5
        assert allocation.strategy == "zero3"


@pytest.mark.parametrize("pool", sorted(MODELS))
def test_pools_match_the_paper(pool: str) -> None:
    models = [policy.model for policy in resolve(Request(pool=pool)).policies]
    assert len(models) == len(MODELS[pool])
    assert all(expected in model for expected, model in zip(MODELS[pool], models, strict=True)), models


def test_4qwen_has_four_kinds_of_qwen() -> None:
    models = [policy.model for policy in resolve(Request(pool="4qwen")).policies]
    assert len(set(models)) == 4
    assert all("Qwen2.5" in model or "Qwen3" in model for model in models)
    assert all("1.5B" in model or "1.7B" in model for model in models)
    assert all(any(kind in model for model in models) for kind in ("Instruct", "Coder", "Math"))


def test_every_arm_of_the_papers_main_comparison_ships_for_every_pool() -> None:
    for pool in ("2qwen", "3qwen", "4qwen", "llama-mist", "qwen-phi4"):
        assert {f"{pool}-{arm}" for arm in ("grpo", "prp", "xgrpo", "sgt")} <= set(PAPER)


@pytest.mark.parametrize("regime", ["grpo", "sgt", "xgrpo"])
def test_pool_and_regime_on_the_command_line_are_the_papers_run(regime: str) -> None:
    """Only the length in epochs, the evaluation split and the pool's file differ."""
    ours = by_dotted_key(resolve(Request(pool="2qwen", regime=regime)).model_dump(mode="json"))
    papers = by_dotted_key(recipe_of(f"2qwen-{regime}").model_dump(mode="json"))
    differing = {key for key in {**ours, **papers} if ours.get(key) != papers.get(key)}
    differing -= {"run.publish"} if regime == "grpo" else set()  # the baseline publishes its rollouts for `distill`
    assert differing <= {"run.epochs", "run.steps", "task.hold_out"}
    assert ours["run.steps"] == 420  # what 15 epochs of 7,498 prompts are


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"problem": f"{i}?", "answer": "1"}) + "\n" for i in range(count)))
    return path


def test_papers_recipe_refuses_to_hold_out_training_rows(cli_here: Cli, tmp_path: Path) -> None:
    train, test = write(tmp_path / "math_train.jsonl", 7498), write(tmp_path / "math_test.jsonl", 5000)
    command = ("train", "paper/2qwen-sgt", "--data", train, "--dry-run", "--json")
    refused = cli_here(*command)
    assert refused.returncode == 2
    assert "would be held out for validation" in refused.stderr
    assert "--set task.validation_data=FILE" in refused.stderr
    plan = json.loads(cli_here(*command, "--set", f"task.validation_data={test}").stdout)
    assert plan["recipe"]["run"]["steps"] == 420
    assert plan["data"] == {
        "train": {"prompts": 7498, "origin": "math_train.jsonl"},
        "validation": {"prompts": 5000, "origin": "math_test.jsonl", "used": 5000, "held_out": False},
    }
    allowed = json.loads(cli_here(*command, "--set", "task.hold_out=true").stdout)
    held_out = allowed["data"]["validation"]
    assert held_out["held_out"] and held_out["origin"] == "held-out rows of math_train.jsonl"
    assert allowed["data"]["train"]["prompts"] + held_out["prompts"] == 7498
    assert any(
        note.startswith(f"trains on {allowed['data']['train']['prompts']:,} prompts") for note in allowed["notes"]
    )


def test_recipes_diff_lists_the_keys_that_differ(cli_here: Cli) -> None:
    result = json.loads(cli_here("recipes", "diff", "paper/2qwen-prp", "2qwen:prp", "--json").stdout)
    differing = {entry["key"]: (entry["a"], entry["b"]) for entry in result["differences"]}
    assert differing["regime.anchor"] == ("paper-fallback", "span")
    assert differing["regime.delta"] == (3.0, 4.0)
    assert "trainer.learning_rate" not in differing
    shown = cli_here("recipes", "diff", "paper/2qwen-prp", "2qwen:prp").stdout
    assert "regime.anchor" in shown and "paper-fallback" in shown
    assert json.loads(cli_here("recipes", "diff", "tiny:sgt", "tiny:sgt", "--json").stdout)["differences"] == []
    assert cli_here("recipes", "diff", "tiny:sgt", "nothing").returncode == 2
