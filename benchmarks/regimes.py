"""Every regime and control on the embedded pool: same pool, prompts, steps, decoding; three seeds.

    python benchmarks/regimes.py                 # about six minutes per arm on 2 cores
    python benchmarks/regimes.py --fresh         # repeat everything; default: only missing results

Runs `mutualrl train` for each seed and arm and writes benchmarks/results/regimes.{json,md}. Accuracy is greedy, on all
held-out problems; entropy and KL are means over the last 50 steps (paper, Section "Optimization Diagnostics"). The
second table has differences from GRPO, paired by seed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from mutualrl.study.comparison import compare, difference_table
from mutualrl.study.outcomes import ALL, Outcome, Outcomes, PolicyOutcome

ARMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "xgrpo": (),
    "xgrpo, shuffled pool": ("regime.pool=shuffled",),
    "grpo-noise": ("regime.equal_groups=exempt",),
    "prp": (),
    "prp, band": ("regime.clip=band",),
    "prp, snapshot": ("regime.denominator=snapshot",),
    "sgt": (),
    "grpo, twice the rollouts": ("trainer.num_generations=8", "trainer.per_device_train_batch_size=256"),
    "hacpo": (),
    "swarm": (),
    "swarm, peer's denominator": ("regime.denominator=peer",),
    "guided": (),
    "sgt, memory": ("regime.memory=100",),
    "sgt, fit": ("regime.pick=lowest_nll",),
    "sgt, own teacher": ("regime.teacher=own", "regime.memory=100"),
    "xgrpo+sgt": (),
    "prp, trust band": ("regime.trust=band",),
}
CELLS = (("ada", "*"), ("ada", "+"), ("bob", "+"), ("bob", "*"))
VALIDATION = ("run.validation_limit=1000", "run.validate_every=0")
LAST = 50


def train(arm: str, seed: int, steps: int | None, directory: Path) -> dict[str, Any]:
    """Make one run, and return its summary and the optimization diagnostics of both policies."""
    run_directory = directory / f"{list(ARMS).index(arm)}-{seed}"
    command = [
        sys.executable,
        "-m",
        "mutualrl",
        "train",
        "--regime",
        arm.split(",", maxsplit=1)[0],
        "--pool",
        "tiny",
        "--seed",
        str(seed),
        "--run-dir",
        str(run_directory),
        "--json",
    ]
    for assignment in (*VALIDATION, *ARMS[arm]):
        command += ["--set", assignment]
    if steps is not None:
        command += ["--steps", str(steps)]
    print(" ".join(command[2:]), file=sys.stderr, flush=True)
    summary = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    policies = {}
    for policy, result in summary["policies"].items():
        lines = (run_directory / "policies" / policy / "metrics.jsonl").read_text().splitlines()[-LAST:]
        rows = [json.loads(line) for line in lines]
        policies[policy] = {
            "initial": result["initial_validation"],
            "final": result["validation"],
            "entropy": statistics.mean(row["entropy"] for row in rows),
            "kl": statistics.mean(row["kl"] for row in rows),
            "train_seconds": round(result["train_seconds"], 1),
        }
    return {"arm": arm, "seed": seed, "steps": summary["steps"], "policies": policies}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean and the sample standard deviation (n - 1) over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def table(runs: list[dict[str, Any]]) -> str:
    """Return one line per arm, and one for the models before training."""
    lines = [
        "| arm | ada `*` (weak) | ada `+` | bob `+` (weak) | bob `*` | both | entropy ada, bob | KL ada, bob |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = runs[0]["policies"]
    before = [f"{first[p]['initial']['by_group'][g]:.2f}" for p, g in CELLS]
    mean = statistics.mean(first[p]["initial"]["accuracy"] for p in first)
    lines.append(f"| before training | {' | '.join(before)} | {mean:.2f} | | |")
    for arm in dict.fromkeys(run["arm"] for run in runs):
        arm_runs = [run["policies"] for run in runs if run["arm"] == arm]
        cells = [spread([run[p]["final"]["by_group"][g] for run in arm_runs]) for p, g in CELLS]
        pool_mean = spread([statistics.mean(run[p]["final"]["accuracy"] for p in run) for run in arm_runs])
        signals = [
            ", ".join(f"{statistics.mean(run[p][key] for run in arm_runs):.2f}" for p in ("ada", "bob"))
            for key in ("entropy", "kl")
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} | {pool_mean} | {' | '.join(signals)} |")
    return "\n".join(lines)


def outcomes(runs: list[dict[str, Any]]) -> Outcomes:
    """Return the runs in the form that a comparison reads."""
    results = []
    for run in runs:
        policies = {}
        for name, policy in run["policies"].items():
            final, initial = policy["final"], policy["initial"]
            policies[name] = PolicyOutcome(
                after={ALL: final["accuracy"], **final["by_group"]},
                before={ALL: initial["accuracy"], **initial["by_group"]},
                problems=final["n"],
                curve=((0, initial["accuracy"]), (run["steps"], final["accuracy"])),
                entropy=policy["entropy"],
                kl=policy["kl"],
            )
        results.append(Outcome("tiny", run["arm"], run["seed"], policies))
    return Outcomes(results)


def main() -> None:
    """Run all and write the results."""
    parser = harness.options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=None, help="default: the pool's own")
    parser.add_argument("--fresh", action="store_true", help="also repeat runs that have results")
    args = harness.parse(parser)
    if args.smoke:
        args.seeds, args.arms, args.steps = [0], ["xgrpo"], 2
    file = args.out / "regimes.json"
    stored_runs = json.loads(file.read_text())["runs"] if file.exists() and not args.fresh else []
    finished = {(run["arm"], run["seed"]): run for run in stored_runs}
    for seed in args.seeds:
        for arm in args.arms:
            if (arm, seed) in finished:
                continue
            with tempfile.TemporaryDirectory() as directory:
                finished[arm, seed] = train(arm, seed, args.steps, Path(directory))
            runs = [run for name in ARMS for (arm_, _), run in sorted(finished.items()) if arm_ == name]
            harness.write(args.out, "regimes", {"command": "python benchmarks/regimes.py", "runs": runs})
    runs = [run for name in ARMS for (arm, _), run in sorted(finished.items()) if arm == name]
    comparison = compare(outcomes(runs), "grpo")
    result = {
        "command": "python benchmarks/regimes.py",
        "effects": comparison.to_json()["differences"]["tiny"],
        "runs": runs,
    }
    harness.write(args.out, "regimes", result, f"{table(runs)}\n\n{difference_table(comparison, 'tiny')}")


if __name__ == "__main__":
    main()
