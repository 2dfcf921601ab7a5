"""Step time on a Ray cluster beside the local launcher's, in one run.

    python benchmarks/ray_overhead.py     # eight minutes on two idle cores; pip install 'mutualrl[ray]'

The same run of the tiny pool (SGT, 30 steps, a thread per policy) is made in turn by the local launcher and on a Ray
cluster of one node on this machine, five times each. Compared are the medians of `step_time` over all steps but the
first five of each run. `busy`: both cores compute all the time, so that whatever Ray's own processes compute is taken
from the training. `waiting`: a step waits 0.8 s for its reward, as one does for a judge or a GPU. Writes
benchmarks/results/ray_overhead.{json,md}.
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
RUNS, STEPS, WARM_UP = 5, 30, 5
STEADY = str(Path(__file__).with_name("paced_rewards.py")) + ":steady"
CASES = {"busy": (), "waiting": ("--set", f"task.reward={STEADY}")}


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
    medians: dict[str, dict[str, list[float]]] = {case: {"local": [], "ray": []} for case in CASES}
    with tempfile.TemporaryDirectory() as directory, ray_cluster(cores) as cluster:
        launchers = {"local": (), "ray": ("--launcher", "ray", "--address", cluster.address)}
        for case, settings in CASES.items():
            for number in range(RUNS):
                for launcher, arguments in launchers.items():
                    times = step_times(Path(directory) / f"{case}-{launcher}-{number}", *settings, *arguments)
                    medians[case][launcher].append(statistics.median(times))
                    print(case, launcher, number, medians[case][launcher][-1], flush=True)
    lines = ["| steps | launcher | median step of each run, ms | median, ms | to local |", "|---|---|---|---|---|"]
    overall: dict[str, dict[str, float]] = {}
    for case, by_launcher in medians.items():
        overall[case] = {launcher: statistics.median(values) for launcher, values in by_launcher.items()}
        for launcher, values in by_launcher.items():
            each = ", ".join(f"{1000 * value:.0f}" for value in values)
            median = overall[case][launcher]
            lines.append(
                f"| {case} | {launcher} | {each} | {1000 * median:.0f} | {median / overall[case]['local']:.3f} |"
            )
    content = {
        "command": "python benchmarks/ray_overhead.py",
        "versions": versions(),
        "cores": cores,
        "medians": medians,
        "overall": overall,
        "ratio": {case: values["ray"] / values["local"] for case, values in overall.items()},
    }
    (RESULTS / "ray_overhead.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / "ray_overhead.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
