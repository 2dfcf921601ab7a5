"""Step time on a Ray cluster and with the local launcher, in one run.

    python benchmarks/ray_overhead.py     # twelve minutes on two idle cores; pip install 'mutualrl[ray]'

The same run of the tiny pool (SGT, 30 steps, a thread per policy) alternates between the local launcher and a Ray
cluster of one node on this machine, five times each. It compares the medians of `step_time` over all steps but the
first five of each run. Three cases:

- `busy`: training uses both cores all the time, so Ray's own processes compete with it.
- `waiting`: a step waits 0.8 s for its reward, as for a judge or a GPU.
- `apart`: training is pinned to the first core, everything else to the second, under both launchers. This is Ray's
  cost per step on a machine with a spare core.

Wall-clock time is noisy, so it also reads the CPU seconds of Ray's own processes (raylet, control store, agents, tasks;
not the training below them), from the sixth step to the last.
Writes benchmarks/results/ray_overhead.{json,md}.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import psutil

import harness
from mutualrl.storage.rundir import versions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
STEADY = str(Path(__file__).with_name("paced_rewards.py")) + ":steady"


class Size(NamedTuple):
    """Runs per case and launcher, and their steps, of which the first `warm_up` are left out."""

    runs: int
    steps: int
    warm_up: int


FULL = Size(5, 30, 5)
CASES = {"busy": (), "waiting": ("--set", f"task.reward={STEADY}"), "apart": ()}


def ray_processes() -> list[psutil.Process]:
    """Return Ray's own processes on this machine."""
    processes = []
    for process in psutil.process_iter(["name", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        name = process.info["name"] or ""
        is_ray = (
            name in ("raylet", "gcs_server") or name.startswith("ray::") or "/ray/" in command or "ray::" in command
        )
        if is_ray and "-m mutualrl" not in command:
            processes.append(process)
    return processes


def ray_seconds() -> float:
    """Return the CPU seconds used so far by Ray's own processes."""
    total = 0.0
    for process in ray_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def pin(process: psutil.Process, core: int) -> None:
    """Pin all threads of a process to a core."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def pin_apart(training_core: int, other_core: int) -> None:
    """Pin the training workers to one core, Ray's processes and the command itself to another."""
    for process in ray_processes():
        pin(process, other_core)
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if "mutualrl.training.worker" in command:
            pin(process, training_core)
        elif "-m mutualrl" in command:
            pin(process, other_core)


def watch(directory: Path, stop: threading.Event, readings: list[tuple[int, float]], *, apart: bool) -> None:
    """Append ada's step count and Ray's CPU seconds twice per second; pin the processes if `apart`."""
    metrics = directory / "policies" / "ada" / "metrics.jsonl"
    cores = sorted(os.sched_getaffinity(0))
    while not stop.wait(0.5):
        if apart:
            pin_apart(cores[0], cores[-1])
        steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        readings.append((steps, ray_seconds()))


def ray_seconds_per_step(readings: list[tuple[int, float]], size: Size) -> float:
    """Return Ray's CPU seconds per step, between the first reading after the warm-up and the last before the end."""
    measured = [(steps, seconds) for steps, seconds in readings if size.warm_up <= steps < size.steps]
    (first, before), (last, after) = measured[0], measured[-1]
    return (after - before) / max(1, last - first)


def step_times(directory: Path, size: Size, *arguments: str) -> list[float]:
    """Make a run, and return the step times of both policies in seconds."""
    command = [sys.executable, "-m", "mutualrl", "train", "--regime", "sgt", "--pool", "tiny", "--run-dir"]
    settings = ["--steps", str(size.steps), "--set", "run.validate_every=0", "--set", "run.validation_limit=8"]
    settings += ["--set", "run.save_every=0", "--no-report"]
    subprocess.run([*command, str(directory), *settings, *arguments], check=True, capture_output=True)
    times = []
    for path in sorted(directory.glob("policies/*/metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        times += [row["step_time"] for row in rows[size.warm_up :]]
    return times


def main() -> None:
    """Make the runs, and write the table."""
    from ray_cluster import ray_cluster

    args = harness.parse(harness.options(__doc__))
    size = Size(1, 4, 1) if args.smoke else FULL
    cases = {"apart": CASES["apart"]} if args.smoke else CASES
    cores = len(os.sched_getaffinity(0))
    medians: dict[str, dict[str, list[float]]] = {case: {"local": [], "ray": []} for case in cases}
    ray_cpu_seconds: dict[str, list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as directory, ray_cluster(cores) as cluster:
        launchers = {"local": (), "ray": ("--launcher", "ray", "--address", cluster.address)}
        for case, settings in cases.items():
            for number in range(size.runs):
                for launcher, arguments in launchers.items():
                    run, stop = Path(directory) / f"{case}-{launcher}-{number}", threading.Event()
                    readings: list[tuple[int, float]] = []
                    watcher = threading.Thread(
                        target=watch, args=(run, stop, readings), kwargs={"apart": case == "apart"}
                    )
                    watcher.start()
                    try:
                        times = step_times(run, size, *settings, *arguments)
                    finally:
                        stop.set()
                        watcher.join()
                    if launcher == "ray":
                        ray_cpu_seconds[case].append(ray_seconds_per_step(readings, size))
                    medians[case][launcher].append(statistics.median(times))
                    print(case, launcher, number, medians[case][launcher][-1], flush=True)
    lines = ["| steps | launcher | median step of each run, ms | median, ms | to local |", "|---|---|---|---|---|"]
    overall: dict[str, dict[str, float]] = {}
    for case, by_launcher in medians.items():
        overall[case] = {launcher: statistics.median(values) for launcher, values in by_launcher.items()}
        for launcher, values in by_launcher.items():
            run_medians = ", ".join(f"{1000 * value:.0f}" for value in values)
            median = overall[case][launcher]
            lines.append(
                f"| {case} | {launcher} | {run_medians} | {1000 * median:.0f} | {median / overall[case]['local']:.3f} |"
            )
    cpu_seconds = {case: statistics.median(values) for case, values in ray_cpu_seconds.items()}
    cores_taken = {case: cpu_seconds[case] / overall[case]["ray"] for case in cases}
    lines += ["", "| steps | CPU of Ray's own processes per step, ms | cores that they take |", "|---|---|---|"]
    lines += [f"| {case} | {1000 * cpu_seconds[case]:.0f} | {cores_taken[case]:.2f} |" for case in cases]
    content = {
        "command": "python benchmarks/ray_overhead.py",
        "versions": versions(),
        "cores": cores,
        "medians": medians,
        "overall": overall,
        "ray_cpu_seconds_per_step": ray_cpu_seconds,
        "cores_taken": cores_taken,
        "ratio": {case: values["ray"] / values["local"] for case, values in overall.items()},
    }
    harness.write(args.out, "ray_overhead", content, "\n".join(lines))


if __name__ == "__main__":
    main()
