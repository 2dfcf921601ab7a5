"""SGT against plain GRPO on the embedded pool, seed by seed: same pool, prompts, steps and decoding.

    python benchmarks/sgt_vs_grpo.py                 # three seeds, two regimes: about ten minutes on 2 cores

Runs `mutualrl train` for each seed and regime, then writes benchmarks/results/sgt_vs_grpo.{json,md}.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

WEAK = {"ada": "*", "bob": "+"}


def train(regime: str, seed: int, steps: int | None, directory: Path) -> dict[str, Any]:
    """Make one run, and return its summary."""
    command = [
        sys.executable,
        "-m",
        "mutualrl",
        "train",
        "--regime",
        regime,
        "--pool",
        "tiny",
        "--seed",
        str(seed),
        "--run-dir",
        str(directory / f"{regime}-{seed}"),
        "--json",
    ]
    if steps is not None:
        command += ["--steps", str(steps)]
    print(" ".join(command[2:]), file=sys.stderr)
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(completed.stdout)
    summary.pop("run_dir")
    return summary


def cell(summary: dict[str, Any], policy: str, group: str) -> str:
    """Return the accuracy before and after training, on one operation."""
    result = summary["policies"][policy]
    before, after = (result[k]["by_group"][group] for k in ("initial_validation", "validation"))
    return f"{before:.2f} -> {after:.2f}"


def table(runs: list[dict[str, Any]]) -> str:
    """Return the table of docs/results.md."""
    lines = [
        "| seed | regime | ada `*` (weak) | ada `+` | bob `+` (weak) | bob `*` | rescued pairs ada / bob | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [cell(run, p, g) for p, g in (("ada", "*"), ("ada", "+"), ("bob", "+"), ("bob", "*"))]
        pairs = " / ".join(str(run["policies"][p]["rescued_pairs"]) for p in ("ada", "bob"))
        lines.append(f"| {run['seed']} | {run['regime']} | {' | '.join(cells)} | {pairs} | {run['seconds']:.0f} |")
    return "\n".join(lines)


def means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean final accuracy on the weak operations, by regime."""
    regimes = dict.fromkeys(run["regime"] for run in runs)
    return {
        regime: {
            policy: round(
                statistics.mean(
                    run["policies"][policy]["validation"]["by_group"][group] for run in runs if run["regime"] == regime
                ),
                3,
            )
            for policy, group in WEAK.items()
        }
        for regime in regimes
    }


def main() -> None:
    """Run all and write the results."""
    parser = harness.options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--regimes", nargs="+", default=["grpo", "sgt"])
    parser.add_argument("--steps", type=int, default=None, help="default: the pool's own")
    args = harness.parse(parser)
    if args.smoke:
        args.seeds, args.regimes, args.steps = [0], ["sgt"], 2
    with tempfile.TemporaryDirectory() as directory:
        runs = [train(r, seed, args.steps, Path(directory)) for seed in args.seeds for r in args.regimes]
    result = {"command": "python benchmarks/sgt_vs_grpo.py", "mean_weak_accuracy": means(runs), "runs": runs}
    harness.write(args.out, "sgt_vs_grpo", result, table(runs))
    print(json.dumps(result["mean_weak_accuracy"]))


if __name__ == "__main__":
    main()
