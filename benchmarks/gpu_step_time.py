"""Cost of a step on one GPU: a plain TRL script, the same policy in `mutualrl train`, and two under each regime.

    python benchmarks/gpu_step_time.py                 # about six minutes
    python benchmarks/gpu_step_time.py --cpu --smoke   # a rehearsal on the CPU

The models have the architectures and tokenizers of `tiny:ada` and `tiny:bob`, 8 layers of 1,024, and a warm-up like
theirs, so that gates open as in training. All runs use bf16 autocast, the same prompts, rollouts and seeds, and
alternate. Writes benchmarks/results/gpu_step_time.{json,md}: medians over the steps after the third.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

import harness
from gpu_check import gpus
from mutualrl.paper.embedded.spec import POLICIES
from mutualrl.storage.rundir import versions

NAMES = ("ada", "bob")
REGIMES = ("grpo", "sgt", "xgrpo", "prp")
LARGE = {
    "hidden": 1024,
    "intermediate": 4096,
    "layers": 8,
    "heads": 16,
    "head_dim": 64,
    "learning_rate": 3e-4,
    "steps": 150,
}
SMALL = {"steps": 20}
PROMPTS = 32
TRAINER = {
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "per_device_train_batch_size": 256,
    "max_completion_length": 20,
    "beta": 0.0,
    "bf16": True,
    "gradient_checkpointing": False,
}
FIRST = 3  # steps that are not counted: kernels are chosen and memory is allocated

Timing = dict[str, float]


def make_models(directory: Path, *, cpu: bool, smoke: bool) -> None:
    """Build and warm up both models."""
    from mutualrl.paper.embedded.build import build_model, build_tokenizer
    from mutualrl.paper.embedded.warmup import warm_up

    for name in NAMES:
        spec = replace(POLICIES[name], **(SMALL if smoke else LARGE))
        tokenizer = build_tokenizer(spec)
        model = build_model(spec, tokenizer).to("cpu" if cpu else "cuda")
        warm_up(model, tokenizer, spec)
        print(f"{name}: {model.num_parameters():,} weights", file=sys.stderr, flush=True)
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def plain_trl(model: Path, steps: int, *, cpu: bool) -> Timing:
    """Train with a plain TRL script; runs in a separate process (`--plain MODEL`)."""
    import torch
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from mutualrl.adapter.data import as_dataset
    from mutualrl.engines.transformers_engine import load_tokenizer
    from mutualrl.tasks import TaskSource, get_task
    from mutualrl.tasks.boxed import boxed_reward

    tokenizer = load_tokenizer(str(model))
    with tempfile.TemporaryDirectory() as output:
        args = GRPOConfig(
            output_dir=output,
            use_cpu=cpu,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            max_steps=steps,
            seed=0,
            model_init_kwargs={"dtype": "float32"},
            **{**TRAINER, "bf16": not cpu},
        )
        dataset = as_dataset(get_task("arithmetic").read("train", TaskSource()).prompts, tokenizer)
        trainer = GRPOTrainer(
            model=str(model), reward_funcs=boxed_reward, args=args, train_dataset=dataset, processing_class=tokenizer
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        seconds = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    peak = 0.0 if cpu else torch.cuda.max_memory_allocated() / 2**30
    return {"step_s": statistics.median(seconds[FIRST:] or seconds), "wait_s": 0.0, "peak_gib": peak}


def run_plain(model: Path, steps: int, *, cpu: bool) -> dict[str, Timing]:
    """Run the plain script in a new process."""
    command = [sys.executable, __file__, "--plain", str(model), "--steps", str(steps), *(["--cpu"] if cpu else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"plain": json.loads(result.stdout.splitlines()[-1])}


def run_ours(regime: str, pool: Path, steps: int, directory: Path) -> dict[str, Timing]:
    """Run the command line once, and return each policy's seconds per step without waiting, and its waiting."""
    command = ["train", "--regime", regime, "--pool", str(pool), "--steps", str(steps)]
    command += ["--run-dir", str(directory), "--json"]
    subprocess.run([sys.executable, "-m", "mutualrl", *command], stdout=subprocess.DEVNULL, check=True)
    timings = {}
    for path in sorted(directory.glob("policies/*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = rows[FIRST:] or rows
        waits = [row.get("see/wait_seconds", 0.0) for row in rows]
        busy = [row["step_time"] - wait for row, wait in zip(rows, waits, strict=True)]
        timings[path.parent.name] = {
            "step_s": statistics.median(busy),
            "wait_s": statistics.median(waits),
            "peak_gib": rows[-1].get("memory/peak_gib", 0.0),
            "lessons": statistics.mean(row.get("sgt/lessons", 0.0) for row in rows),
        }
    return timings


def write_pool(path: Path, models: Path, names: tuple[str, ...], *, cpu: bool) -> Path:
    """Write a pool of these models."""
    shared = {"strategy": "ddp", "share_gpus": len(names) > 1 and not cpu}
    pool = {
        "policies": [{"name": name, "model": str(models / name)} for name in names],
        "task": "arithmetic",
        "hardware": {"gpus": 0 if cpu else 1},
        "launch": shared,
        "round": {"prompts": PROMPTS, "optimizer_steps": 1},
        "run": {"validate_every": 0, "validation_limit": 2, "save_every": 0},
        "trainer": {**TRAINER, "bf16": not cpu},
    }
    path.write_text(yaml.safe_dump(pool, sort_keys=False), encoding="utf-8")
    return path


def measure(
    directory: Path, regimes: Sequence[str], repeats: int, steps: int, *, cpu: bool
) -> Iterator[dict[str, Any]]:
    """Yield the timings of every run."""
    models = directory / "models"
    alone = write_pool(directory / "alone.yaml", models, NAMES[:1], cpu=cpu)
    pair = write_pool(directory / "pair.yaml", models, NAMES, cpu=cpu)
    for repeat in range(repeats):
        yield {"what": "plain TRL", "repeat": repeat, **run_plain(models / NAMES[0], steps, cpu=cpu)}
        target = directory / f"alone-{repeat}"
        yield {"what": "grpo, one policy", "repeat": repeat, **run_ours("grpo", alone, steps, target)}
        for regime in regimes:
            target = directory / f"{regime}-{repeat}"
            yield {"what": f"{regime}, two policies", "repeat": repeat, **run_ours(regime, pair, steps, target)}


def table(runs: list[dict[str, Any]]) -> str:
    """Return medians by setting. The first two are the same policy alone; the rest is its time beside a peer."""
    by_setting: dict[str, list[Mapping[str, float]]] = {}
    for run in runs:
        by_setting.setdefault(run["what"], []).append(run.get("plain") or run["ada"])
    lines = [
        "| what | seconds per step (median) | ratio to plain TRL | ratio to grpo, two policies | waiting | peak GiB |"
    ]
    lines.append("|---|---|---|---|---|---|")
    seconds = {what: statistics.median(t["step_s"] for t in timings) for what, timings in by_setting.items()}
    for what, timings in by_setting.items():
        wait = statistics.median(t["wait_s"] for t in timings)
        peak = max(t["peak_gib"] for t in timings)
        beside = f"{seconds[what] / seconds['grpo, two policies']:.2f}" if "two" in what else ""
        ratio = seconds[what] / seconds["plain TRL"]
        lines.append(f"| {what} | {seconds[what]:.3f} | {ratio:.2f} | {beside} | {wait:.3f} | {peak:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Make the models, measure, write, print."""
    parser = harness.options(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU")
    parser.add_argument("--plain", type=Path, default=None, help=argparse.SUPPRESS)
    args = harness.parse(parser)
    if args.plain is not None:
        print(json.dumps(plain_trl(args.plain, args.steps, cpu=args.cpu)))
        return
    if not gpus() and not args.cpu:
        sys.exit("no GPU found by nvidia-smi; --cpu rehearses on the CPU")
    if args.smoke:
        args.repeats, args.steps = 1, 2
    regimes = () if args.smoke else REGIMES
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_models(directory / "models", cpu=args.cpu, smoke=args.smoke)
        runs = []
        for run in measure(directory, regimes, args.repeats, args.steps, cpu=args.cpu):
            print(json.dumps(run), file=sys.stderr, flush=True)
            runs.append(run)
    command = "python benchmarks/gpu_step_time.py" + (" --cpu" if args.cpu else "")
    sizes = {"repeats": args.repeats, "steps": args.steps}
    result = {"command": command, "versions": versions(), "gpus": gpus(), **sizes, "runs": runs}
    harness.write(args.out, "gpu_step_time", result, table(runs))


if __name__ == "__main__":
    main()
