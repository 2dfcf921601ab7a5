"""Check that everything runs on this GPU machine, and measure its speed: the embedded pool, ZeRO-3, every regime.

    python benchmarks/gpu_check.py               # a few minutes on one node; needs pip install 'mutualrl[node]'
    python benchmarks/gpu_check.py --cpu         # a rehearsal on two CPU ranks per policy

Covers the two policies on separate GPUs (with two or more), sharing all GPUs, and sampling with vLLM if it is
installed. Prints seconds per step, tokens per second and peak memory of every policy, and writes
benchmarks/results/gpu_check.json. Exits with 1 if a run failed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
from mutualrl.storage.rundir import versions

REGIMES = ("grpo", "grpo-noise", "xgrpo", "prp", "sgt")


def gpus() -> list[str]:
    """Return the names of the GPUs listed by nvidia-smi."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def layouts(count: int, *, cpu: bool, ranks: int = 2) -> dict[str, list[str]]:
    """Return the settings for each way to place two policies."""
    if cpu:
        return {f"{ranks} CPU ranks per policy": ["hardware.gpus=0", f"launch.processes={ranks}"]}
    sharing = {"sharing": [f"hardware.gpus={count}", "launch.share_gpus=true"]}
    return ({"splitting": [f"hardware.gpus={count - count % 2}"]} if count >= 2 else {}) | sharing


def run(regime: str, settings: list[str], steps: int, directory: Path) -> dict[str, Any]:
    """Make one run through the command line, and return each policy's measurements, or the error."""
    command = [
        sys.executable,
        "-m",
        "mutualrl",
        "train",
        "--regime",
        regime,
        "--pool",
        "tiny",
        "--steps",
        str(steps),
        "--run-dir",
        str(directory),
        "--json",
    ]
    for assignment in (
        "launch.strategy=zero3",
        "trainer.per_device_train_batch_size=16",
        "run.validation_limit=16",
        "run.validate_every=0",
        *settings,
    ):
        command += ["--set", assignment]
    print(" ".join(command[2:]), file=sys.stderr, flush=True)
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    summary = json.loads(completed.stdout)
    if completed.returncode:
        return {"error": summary["error"]["message"]}
    return {policy: measured(directory / "policies" / policy / "metrics.jsonl") for policy in summary["policies"]}


def measured(path: Path) -> dict[str, float | None]:
    """Return medians over the steps after the first."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = statistics.median(row["step_time"] for row in rows[1:])
    tokens = statistics.median(b["num_tokens"] - a["num_tokens"] for a, b in pairwise(rows))
    return {
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "peak_memory_gib": rows[-1].get("memory/peak_gib"),
    }


def main() -> None:
    """Make all runs, print each result immediately, and write the results."""
    parser = harness.options(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cpu", action="store_true", help="rehearse on CPU ranks")
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES)
    args = harness.parse(parser)
    if args.smoke:
        args.steps, args.regimes = 2, args.regimes[-1:]
    gpu_names = gpus()
    if not gpu_names and not args.cpu:
        sys.exit("no GPU found by nvidia-smi; --cpu rehearses on CPU ranks")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for layout, settings in layouts(len(gpu_names), cpu=args.cpu, ranks=1 if args.smoke else 2).items():
            for engine in ("transformers", "vllm") if find_spec("vllm") and not args.cpu else ("transformers",):
                vllm_settings = (
                    ["trainer.use_vllm=true", "trainer.vllm_max_model_length=128"] if engine == "vllm" else []
                )
                for regime in args.regimes:
                    run_directory = Path(directory) / f"{len(runs)}"
                    policies = run(regime, settings + vllm_settings, args.steps, run_directory)
                    runs.append({"layout": layout, "engine": engine, "regime": regime, "policies": policies})
                    print(json.dumps(runs[-1]), flush=True)
    command = "python benchmarks/gpu_check.py" + (" --cpu" if args.cpu else "")
    result = {"command": command, "versions": versions(), "gpus": gpu_names, "runs": runs}
    harness.write(args.out, "gpu_check", result)
    sys.exit(any("error" in entry["policies"] for entry in runs))


if __name__ == "__main__":
    main()
