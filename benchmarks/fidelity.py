"""Our regime `grpo` compared with plain TRL: same policies, seeds, prompts; accuracy, reward, loss, tokens per second.

    python benchmarks/fidelity.py                 # about three minutes on two cores

The plain arm is TRL's own GRPOTrainer in a script without an exchange, a supervisor or our trainer; its two policies
run in parallel like ours. Writes benchmarks/results/fidelity.{json,md} and the paper's figure "System sanity check on
single-policy GRPO" drawn from both, through `mutualrl report`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

STEPS = 160
SETTINGS = ("run.validate_every=10", "run.validation_limit=1000", "run.save_every=0")


def plain(policy: str, recipe_file: Path, root: Path) -> None:
    """Train one policy with TRL's GRPOTrainer alone, recording its steps like ours."""
    import torch

    torch.set_num_threads(1)
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    from mutualrl.adapter.data import as_dataset
    from mutualrl.recipes import load
    from mutualrl.recipes.agreement import load_recipe_prompts
    from mutualrl.recipes.batch_plan import plan_batch
    from mutualrl.recipes.pool_tokenizers import load_tokenizers
    from mutualrl.storage.allocation import Allocation
    from mutualrl.storage.files import write_checksummed
    from mutualrl.storage.run_info import PolicyResult
    from mutualrl.tasks.rewards import load_rewards
    from mutualrl.tiny import resolve_path
    from mutualrl.training.build import seed_policy
    from mutualrl.training.callback import MetricsCallback
    from mutualrl.training.config import grpo_config
    from mutualrl.training.validation import Validator

    recipe = load(recipe_file)
    tokenizer = load_tokenizers(recipe)[policy]
    files = root / "policies" / policy
    files.mkdir(parents=True)
    allocation = Allocation(policy, (), 1, 1, "ddp", plan_batch(recipe, policy, 1))
    args = grpo_config(recipe, allocation, files / "trainer", cpu=True)
    trainer = GRPOTrainer(
        model=resolve_path(recipe.policy(policy).model),
        reward_funcs=load_rewards(recipe.task.reward),
        args=args,
        train_dataset=as_dataset(load_recipe_prompts(recipe, "train"), tokenizer),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    seed_policy(recipe, policy, 0)
    validator = Validator(trainer, load_recipe_prompts(recipe, "validation"))
    trainer.add_callback(
        MetricsCallback(files / "metrics.jsonl", validator, recipe.run.validate_every, recipe.run.steps)
    )
    before = validator()
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    result = PolicyResult(
        initial_validation=before,
        validation=validator(),
        steps=recipe.run.steps,
        train_seconds=seconds,
    )
    write_checksummed(files / "result.json", result.to_json(), root=root)


def run_plain(ours: Path, root: Path) -> None:
    """Train all policies of the run `ours` with plain TRL, in parallel, into a directory that reads like a run."""
    from mutualrl.storage.files import read_checksummed, write_checksummed
    from mutualrl.storage.run_info import Summary, policy_result

    info = read_checksummed(ours / "run.json", root=ours)
    assert info is not None
    root.mkdir(parents=True)
    recipe = root / "recipe.yaml"
    shutil.copy(ours / "recipe.yaml", recipe)
    described = {**info["regime_info"], "name": "trl"}
    info |= {"regime": "trl", "regime_info": described, "command": ["python", "benchmarks/fidelity.py"]}
    write_checksummed(root / "run.json", info, root=root)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--policy", name, "--recipe", str(recipe), "--root", str(root)], env=environment
        )
        for name in info["placement"]
    ]
    if any([child.wait() for child in children]):  # noqa: C419  (wait for every one)
        raise SystemExit("a plain run failed")
    results = {}
    for name in info["placement"]:
        result = policy_result(root / "policies" / name / "result.json", root)
        assert result is not None
        results[name] = result
    summary = Summary(
        regime="trl",
        pool=info["pool"],
        task=info["fingerprint"]["task"],
        seed=info["seed"],
        steps=info["fingerprint"]["steps"],
        seconds=max(result.train_seconds for result in results.values()),
        policies=results,
    )
    write_checksummed(root / "summary.json", summary.to_json(), root=root)


def compared(ours: Path, trl_root: Path) -> tuple[dict[str, Any], str]:
    """Return the largest differences, and the medians of the speed on steps without validation."""
    from mutualrl.runs.curves import tokens_per_second
    from mutualrl.runs.logs import ACCURACY, read_logged

    own_run, trl_run = read_logged(ours), read_logged(trl_root)
    lines = [
        "| policy | steps | largest difference: reward | loss | KL | validation accuracy | tokens/s, plain TRL | ours "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    results = {}
    for name in own_run.policies:
        largest = {}
        for label, metric in (("reward", "reward"), ("loss", "loss"), ("kl", "kl"), ("accuracy", ACCURACY)):
            own, plain = own_run.series(name, metric), trl_run.series(name, metric)
            if not own.index.equals(plain.index):
                raise SystemExit(f"{name}: {metric} was measured at other steps by plain TRL")
            largest[label] = float((own - plain).abs().max())
        speed = {}
        for label, run in (("ours", own_run), ("trl", trl_run)):
            speed[label] = float(tokens_per_second(run, name, without_validation=True).median())
        steps = own_run.steps[name]
        results[name] = {"steps": steps, "largest_difference": largest, "tokens_per_second": speed}
        cells = [f"{largest[key]:g}" for key in ("reward", "loss", "kl", "accuracy")]
        ratio = speed["ours"] / speed["trl"]
        lines.append(
            f"| {name} | {steps} | {' | '.join(cells)} | {speed['trl']:.0f} | {speed['ours']:.0f} | {ratio:.2f} |"
        )
    return results, "\n".join(lines)


def main() -> None:
    """Run both, compare, draw."""
    parser = harness.options(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--recipe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = harness.parse(parser)
    if args.policy:
        plain(args.policy, args.recipe, args.root)
        return
    with tempfile.TemporaryDirectory() as directory:
        ours, trl_root, page, figures = (Path(directory) / name for name in ("grpo", "trl", "page", "figures"))
        command = [
            "train",
            "--regime",
            "grpo",
            "--pool",
            "tiny",
            "--steps",
            str(2 if args.smoke else args.steps),
            "--run-dir",
            str(ours),
            "--no-report",
        ]
        for setting in SETTINGS:
            command += ["--set", setting]
        subprocess.run([sys.executable, "-m", "mutualrl", *command], check=True, stdout=sys.stderr)
        run_plain(ours, trl_root)
        policies, text = compared(ours, trl_root)
        drawn = ["report", str(ours), str(trl_root), "--out", str(page), "--figures", str(figures)]
        subprocess.run([sys.executable, "-m", "mutualrl", *drawn], check=True, stdout=sys.stderr)
        for suffix in ("png", "svg"):
            figure = next(figures.glob(f"*-fidelity.{suffix}"))
            shutil.copy(figure, args.out / f"fidelity.{suffix}")
    result = {"command": "python benchmarks/fidelity.py", "policies": policies}
    harness.write(args.out, "fidelity", result, text)


if __name__ == "__main__":
    main()
