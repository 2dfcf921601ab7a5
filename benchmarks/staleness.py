"""Peers of unequal speed: the time saved by `exchange.staleness`, and its cost in accuracy.

    python benchmarks/staleness.py            # 24 runs of two to three minutes; resumes after an interruption
    python benchmarks/staleness.py --table    # the table of the existing runs

Pool tiny under SGT, 64 rounds, three seeds. In `half` the rounds of one policy take twice as long as the other's; in
`uneven` every round's time is drawn. The delays are sleeps in the reward function (paced_rewards.py). The table
also has the time predicted by the report of the run without staleness (mutualrl.reporting.pace). Writes
benchmarks/results/staleness.{json,md}.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import harness
import sweep_results as sweeps
from mutualrl.reporting.pace import simulate
from mutualrl.runs.curves import busy_seconds
from mutualrl.runs.logs import LoggedRun, read_runs
from mutualrl.storage.files import JsonObject
from mutualrl.storage.rundir import versions
from mutualrl.study.statistics import Estimate

PACES = ("half", "uneven")
STALENESS = (0, 1, 2, 4)
FAST = "ada"
WAIT = "see/wait_seconds"
PROBLEMS = 64  # held out


def measured(run: LoggedRun) -> JsonObject:
    """Return a run's rounds per second, waiting fractions, accuracy by policy, and the largest lag of the fast one."""
    busy = {name: busy_seconds(run, name) for name in run.policies}
    waited = {name: run.total(name, WAIT) for name in run.policies}
    seconds = {name: sum(busy[name]) + waited[name] for name in run.policies}
    lag = run.series(FAST, "see/lag")
    return {
        "seed": run.seed,
        "seconds": max(seconds.values()),
        "rounds_per_second": len(run.series(FAST, WAIT)) / seconds[FAST],
        "waiting": {name: waited[name] / seconds[name] for name in run.policies},
        "largest_lag": 0.0 if lag.empty else float(lag.max()),
        "late_rows": {name: run.total(name, "see/late_rows") for name in run.policies},
        "accuracy": {name: policy.final for name, policy in run.policies.items()},
        "simulated": {str(k): simulate(busy, k).seconds for k in STALENESS},
    }


def collect(pieces: Path) -> JsonObject:
    """Return the measurements of the finished runs, `{pace: {staleness: [by seed]}}`."""
    measurements: JsonObject = {}
    for pace in PACES:
        for staleness in STALENESS:
            paths = sorted(path for path in pieces.glob(f"{pace}*{staleness}-*") if (path / "summary.json").is_file())
            runs = read_runs(paths) if paths else []
            measurements.setdefault(pace, {})[str(staleness)] = [measured(run) for run in runs]
    return measurements


def summarised(measurements: JsonObject) -> list[JsonObject]:
    """Return a row per pace and staleness: means over seeds, and the difference in accuracy from the same seed at 0."""
    rows = []
    for pace, by_staleness in measurements.items():
        baseline = {run["seed"]: run for run in by_staleness["0"]}
        for staleness, runs in by_staleness.items():
            if not runs:
                continue
            pool = {run["seed"]: statistics.fmean(run["accuracy"].values()) for run in runs}
            before = {seed: statistics.fmean(baseline[seed]["accuracy"].values()) for seed in pool if seed in baseline}
            gained = [pool[seed] - before[seed] for seed in before]
            difference = Estimate.of(gained, resolution=1 / PROBLEMS) if len(gained) > 1 else None
            predicted = [run["simulated"][staleness] for run in baseline.values()]
            rows.append(
                {
                    "pace": pace,
                    "staleness": int(staleness),
                    "seeds": len(runs),
                    "seconds": statistics.fmean(run["seconds"] for run in runs),
                    "predicted_seconds": statistics.fmean(predicted) if predicted else None,
                    "rounds_per_second": statistics.fmean(run["rounds_per_second"] for run in runs),
                    "waiting": statistics.fmean(run["waiting"][FAST] for run in runs),
                    "accuracy": statistics.fmean(pool.values()),
                    "difference": difference
                    and {"mean": difference.mean, "low": difference.low, "high": difference.high},
                }
            )
    return rows


def table(rows: list[JsonObject]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| rounds | staleness | seconds of the run | predicted | rounds per second of the fast policy | it waits | "
        "accuracy | minus that at 0 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        difference = row["difference"] if row["staleness"] else None
        interval = "" if difference is None else "{mean:+.3f} [{low:+.3f}, {high:+.3f}]".format(**difference)
        lines.append(
            f"| {row['pace']} | {row['staleness']} | {row['seconds']:.1f} | {row['predicted_seconds']:.1f} | "
            f"{row['rounds_per_second']:.2f} | {100 * row['waiting']:.0f} % | {row['accuracy']:.3f} | {interval} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = harness.options(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "staleness", help="directory of the sweep")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table of the existing runs")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; they sleep for most of their time")
    args = harness.parse(parser)
    file = sweeps.SWEEPS / "staleness.yaml"
    if args.smoke:
        file, args.runs = sweeps.smoke_sweep("staleness", ("half 0",), args.out), args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs, "--jobs", str(args.jobs))
    measurements = collect(args.runs / "pieces" / "tiny")
    rows = summarised(measurements)
    content = {"command": "python benchmarks/staleness.py", "versions": versions(), "rows": rows, "runs": measurements}
    harness.write(args.out, "staleness", content, table(rows), indent=None)


if __name__ == "__main__":
    main()
