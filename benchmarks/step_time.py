"""Cost of a step: `--regime grpo` against a plain TRL script, and `--regime sgt` against `--regime grpo`.

    python benchmarks/step_time.py            # about eight minutes on 2 free cores
    python benchmarks/step_time.py --phases   # what a round adds, by phase: about two minutes

Same model, prompts, seeds and settings. The runs alternate, and medians and ratios are reported, because
single timings are noisy. Writes benchmarks/results/step_time.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import step_phases

POOL_OF_ONE = 'policies: [{name: ada, model: "tiny:ada"}]\n'


def settings() -> dict[str, Any]:
    """Return the resolved recipe of the tiny pool."""
    from mutualrl.recipes import Request, resolve

    recipe = resolve(Request(pool="tiny"))
    return {"trainer": recipe.trainer, "prompts": recipe.round.prompts}


def plain_trl(steps: int) -> float:
    """Return seconds per step of a plain TRL script; runs in a separate process (`--plain STEPS`)."""
    import torch
    from transformers import PrinterCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from mutualrl.adapter.data import as_dataset
    from mutualrl.engines import Sampling
    from mutualrl.engines.transformers_engine import TransformersEngine, load_tokenizer
    from mutualrl.seeds import policy_seed
    from mutualrl.tasks import TaskSource, get_task
    from mutualrl.tasks.boxed import boxed_reward
    from mutualrl.tiny import path_of

    torch.set_num_threads(1)
    model = str(path_of("ada"))
    tokenizer = load_tokenizer(model)
    with tempfile.TemporaryDirectory() as output:
        args = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=steps,
            seed=0,
            **settings()["trainer"],
        )
        dataset = as_dataset(get_task("arithmetic").read("train", TaskSource()).prompts, tokenizer)
        trainer = GRPOTrainer(
            model=model, reward_funcs=boxed_reward, args=args, train_dataset=dataset, processing_class=tokenizer
        )
        trainer.remove_callback(PrinterCallback)
        # A run validates before it trains, and the first generation of a process costs an extra second.
        TransformersEngine(trainer.model, tokenizer).generate(dataset["prompt"][:2], Sampling(max_new_tokens=20))
        trainer.model.train()
        set_seed(policy_seed(0, "ada", 0))
        began = time.monotonic()
        trainer.train()
        return (time.monotonic() - began) / steps


def run_plain(steps: int) -> float:
    """Return seconds per step of the plain script, in a new process."""
    command = [sys.executable, __file__, "--plain", str(steps)]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=one_thread(), preexec_fn=on_one_core
    )
    return float(result.stdout.split()[-1])


def on_one_core() -> None:
    """Pin a process and its children to one core: a pool of one would otherwise get two threads."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def one_thread() -> dict[str, str]:
    """Return the environment that a run sets for each of two policies on two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_ours(regime: str, steps: int, pool: str, directory: Path, save_every: int = 0) -> dict[str, Any]:
    """Run the command line once without intermediate validation, and return the policies' results. With
    `save_every=0` the only checkpoint is that of the last step."""
    target = directory / f"{regime}-{time.monotonic_ns()}"
    command = [
        sys.executable,
        "-m",
        "mutualrl",
        "train",
        "--regime",
        regime,
        "--pool",
        pool,
        "--task",
        "arithmetic",
        "--steps",
        str(steps),
        "--run-dir",
        str(target),
        "--json",
        "--set",
        "run.validate_every=0",
        "--set",
        "run.validation_limit=2",
        "--set",
        f"run.save_every={save_every}",
    ]
    if pool != "tiny":
        for key, value in settings()["trainer"].items():
            command += ["--set", f"trainer.{key}={value}"]
        command += ["--set", f"round.prompts={settings()['prompts']}"]
    alone = None if pool == "tiny" else on_one_core
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=one_thread(), preexec_fn=alone)
    policies: dict[str, Any] = json.loads(result.stdout)["policies"]
    for name, policy in policies.items():
        lines = (target / "policies" / name / "metrics.jsonl").read_text().splitlines()
        policy["tokens"] = json.loads(lines[-1])["num_tokens"]
        policy["extra_tokens"] = sum(json.loads(line).get("plan/extra_tokens", 0.0) for line in lines)
    return policies


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Return all timings, in seconds per step."""
    plain: list[float] = []
    alone: list[float] = []
    saving: list[float] = []
    grpo: list[float] = []
    sgt: list[float] = []
    waits: list[float] = []
    extra: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pool = directory / "one.yaml"
        pool.write_text(POOL_OF_ONE)
        for repeat in range(repeats):
            print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr)
            plain.append(run_plain(steps))
            alone.append(run_ours("grpo", steps, str(pool), directory)["ada"]["train_seconds"] / steps)
            saving.append(run_ours("grpo", steps, str(pool), directory, 20)["ada"]["train_seconds"] / steps)
            for regime, seconds in (("grpo", grpo), ("sgt", sgt)):
                policies = run_ours(regime, steps, "tiny", directory).values()
                seconds.append(sum(p["train_seconds"] - p["wait_seconds"] for p in policies) / len(policies) / steps)
                if regime == "sgt":
                    waits.append(sum(p["wait_seconds"] for p in policies) / len(policies) / steps)
                    extra.append(sum(p["extra_tokens"] for p in policies) / sum(p["tokens"] for p in policies))
    return {
        "plain_trl": plain,
        "grpo_alone": alone,
        "grpo_saving": saving,
        "grpo": grpo,
        "sgt": sgt,
        "sgt_wait": waits,
        "sgt_extra_tokens": extra,
    }


def table(timings: dict[str, Any]) -> str:
    """Return the table of docs/results.md."""
    median = {key: statistics.median(values) for key, values in timings.items()}
    rows = [
        ("plain TRL script, one policy", median["plain_trl"], 1.0),
        ("`--regime grpo`, the same policy", median["grpo_alone"], median["grpo_alone"] / median["plain_trl"]),
        (
            "the same with a durable checkpoint every 20 steps",
            median["grpo_saving"],
            median["grpo_saving"] / median["plain_trl"],
        ),
        ("`--regime grpo`, tiny pool", median["grpo"], 1.0),
        ("`--regime sgt`, tiny pool, waiting apart", median["sgt"], median["sgt"] / median["grpo"]),
        ("waiting for the peer under sgt", median["sgt_wait"], median["sgt_wait"] / median["grpo"]),
    ]
    lines = ["| what | seconds per step (median) | ratio |", "|---|---|---|"]
    lines += [f"| {name} | {seconds:.3f} | {ratio:.2f} |" for name, seconds, ratio in rows]
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plain", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--phases", action="store_true", help="a round by phase: results/step_time_phases.{json,md}")
    step_phases.add_options(parser)
    args = harness.parse(parser)
    if args.phases:
        step_phases.report(args, *((1, 2) if args.smoke else (3, 20)))
        return
    if args.plain is not None:
        print(plain_trl(args.plain))
        return
    repeats, steps = (1, 2) if args.smoke else (args.repeats, args.steps)
    timings = measure(repeats, steps)
    result = {"command": "python benchmarks/step_time.py", "repeats": repeats, "steps": steps, **timings}
    harness.write(args.out, "step_time", result, table(timings))


if __name__ == "__main__":
    main()
