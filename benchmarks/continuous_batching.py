"""Sampling with transformers' continuous batching and with TRL's padded batches, on the CPU, in one run.

    python benchmarks/continuous_batching.py     # a minute and a half on two idle cores

The same run of one embedded policy (GRPO, one thread) alternates between the ways to sample. It compares the median of
`step_time` over all steps but the first, and the peak memory of the run's processes. `default` is
`trainer.use_transformers_continuous_batching` alone: its cache takes half of the free memory. `small cache` limits it
to the needs of the batch. Writes benchmarks/results/continuous_batching.{json,md}.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

import harness
from mutualrl.storage.rundir import versions

POOL = 'policies: [{name: ada, model: "tiny:ada"}]\nhardware: {gpus: 0}\n'
BATCH = ("round.prompts=16", "trainer.num_generations=4", "trainer.per_device_train_batch_size=64")
CONTINUOUS = "trainer.use_transformers_continuous_batching=true"
SMALL = "trainer.transformers_continuous_batching_config={num_blocks: 256, block_size: 32, max_batch_tokens: 512}"
#: ways to sample: settings, number of runs, and steps per run (a step takes seconds under `default`)
WAYS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "padded batches": ((), 3, 12),
    "continuous, small cache": ((CONTINUOUS, SMALL), 3, 12),
    "continuous, default": ((CONTINUOUS,), 1, 3),
}


def peak_memory(process: subprocess.Popen[bytes], stop: threading.Event) -> int:
    """Return the peak resident memory, in bytes, of a process and its descendants until it exits."""
    peak, root = 0, psutil.Process(process.pid)
    while not stop.wait(0.1):
        total = 0
        for member in (root, *_children(root)):
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, total)
    return peak


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def run(directory: Path, settings: tuple[str, ...], steps: int) -> tuple[float, int]:
    """Make a run, and return the median seconds of a step and the peak memory in bytes."""
    (directory.parent / "one.yaml").write_text(POOL)
    command = [sys.executable, "-m", "mutualrl", "train", "--pool", str(directory.parent / "one.yaml"), "--no-report"]
    command += ["--steps", str(steps), "--run-dir", str(directory)]
    for setting in (*BATCH, "run.validate_every=0", "run.validation_limit=1", "run.save_every=0", *settings):
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    stop, peaks = threading.Event(), []
    watcher = threading.Thread(target=lambda: peaks.append(peak_memory(process, stop)))
    watcher.start()
    errors = process.communicate()[1]
    stop.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(errors.decode())
    rows = [json.loads(line) for line in (directory / "policies" / "ada" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([row["step_time"] for row in rows if "step_time" in row][1:]), peaks[0]


def main() -> None:
    """Make the runs, and write the table."""
    args = harness.parse(harness.options(__doc__))
    ways = WAYS
    if args.smoke:  # without the one whose cache takes half of the memory
        ways = {way: (settings, 1, 2) for way, (settings, _, _) in WAYS.items() if way != "continuous, default"}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    memory: dict[str, list[int]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(max(runs for _, runs, _ in ways.values())):
            for index, (way, (settings, runs, steps)) in enumerate(ways.items()):
                if number >= runs:
                    continue
                median, peak = run(Path(directory) / f"{index}-{number}", settings, steps)
                seconds[way].append(median)
                memory[way].append(peak)
                print(way, f"{median:.3f} s, {peak / 2**30:.1f} GiB", flush=True)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    gibibytes = {way: max(values) / 2**30 for way, values in memory.items()}
    padded = medians["padded batches"]
    lines = [
        "| sampling | median step of each run, s | median, s | to padded | largest memory, GiB |",
        "|---|---|---|---|---|",
    ]
    for way, values in seconds.items():
        run_medians = ", ".join(f"{value:.2f}" for value in values)
        lines.append(
            f"| {way} | {run_medians} | {medians[way]:.2f} | {medians[way] / padded:.1f} | {gibibytes[way]:.1f} |"
        )
    content = {
        "command": "python benchmarks/continuous_batching.py",
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_of_the_machine": psutil.virtual_memory().total / 2**30,
        "seconds": seconds,
        "medians": medians,
        "to_padded": {way: median / padded for way, median in medians.items()},
        "gibibytes": gibibytes,
    }
    harness.write(args.out, "continuous_batching", content, "\n".join(lines))


if __name__ == "__main__":
    main()
