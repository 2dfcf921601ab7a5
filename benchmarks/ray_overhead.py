"""Step time on a Ray cluster beside the local launcher's, in one run.

    python benchmarks/ray_overhead.py     # ten minutes on two idle cores; pip install 'mutualrl[ray]'

The same run of the tiny pool (SGT, 40 steps, a thread per policy) is made in turn by the local launcher and on a Ray
cluster of one node on this machine, three times each. Compared are the medians of `step_time` over all steps but the
first five of each run. Writes benchmarks/results/ray_overhead.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mutualrl.storage.rundir import versions

RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
RUNS, STEPS, WARM_UP = 3, 40, 5


def step_times(directory: Path, *arguments: str) -> list[float]:
    """Make a run and return the seconds of its steps, of both policies."""
    command = [sys.executable, "-m", "mutualrl", "train", "--regime", "sgt", "--pool", "tiny", "--run-dir"]
    settings = ["--steps", str(STEPS), "--set", "run.validate_every=0", "--set", "run.validation_limit=8"]
    settings += ["--set", "run.save_every=0", "--no-report"]
    subprocess.run([*command, str(directory), *settings, *arguments], check=True, capture_output=True)
    times = []
    for path in sorted(directory.glob("policies/*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        times += [row["step_time"] for row in rows[WARM_UP:]]
    return times


def main() -> None:
    """Make the runs, and write the table."""
    from ray_cluster import ray_cluster

    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cores = len(os.sched_getaffinity(0))
    seconds: dict[str, list[list[float]]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as directory, ray_cluster(cores) as cluster:
        for number in range(RUNS):
            for launcher, arguments in (("local", ()), ("ray", ("--launcher", "ray", "--address", cluster.address))):
                seconds[launcher].append(step_times(Path(directory) / f"{launcher}-{number}", *arguments))
                print(launcher, number, statistics.median(seconds[launcher][-1]), flush=True)
    medians = {launcher: [statistics.median(times) for times in runs] for launcher, runs in seconds.items()}
    overall = {launcher: statistics.median(values) for launcher, values in medians.items()}
    ratio = overall["ray"] / overall["local"]
    content = {
        "command": "python benchmarks/ray_overhead.py",
        "versions": versions(),
        "cores": cores,
        "medians": medians,
        "overall": overall,
        "ratio": ratio,
    }
    lines = ["| launcher | median step of each run, ms | median, ms | to local |", "|---|---|---|---|"]
    for launcher, values in medians.items():
        each = ", ".join(f"{1000 * value:.0f}" for value in values)
        share = overall[launcher] / overall["local"]
        lines.append(f"| {launcher} | {each} | {1000 * overall[launcher]:.0f} | {share:.3f} |")
    (RESULTS / "ray_overhead.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "ray_overhead.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
