"""Rescue in one's own words against a peer's words, against its controls, and against GRPO with the same tokens.

    python benchmarks/hints.py              # everything, an hour on 2 cores; resumes after an interruption
    python benchmarks/hints.py --table      # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/hints.yaml` on the embedded pool `tiny-hints`, and `hints-countdown.yaml` on
`tiny-countdown`, whose policies cannot use a hint; and before both, `mutualrl complementarity --hints` on each pool. It
writes `benchmarks/results/hints.json` and `hints_countdown.json`, with tables, and `hints_prediction.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import sweep_results as sweeps

#: results by sweep
NAMES = {"hints": "hints", "hints-countdown": "hints_countdown"}


POOLS = ("tiny-hints", "tiny-countdown")
PREDICTED = ["--samples", "4", "--seed", "0", "--engine", "transformers", "--hints", "--json"]


def predicted(pool: str, prompts: int) -> dict[str, Any]:
    """Return what `complementarity --hints` says of a pool before training."""
    command = ["complementarity", "--pool", pool, "--prompts", str(prompts), *PREDICTED]
    done = subprocess.run([sys.executable, "-m", "mutualrl", *command], check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    return {key: result[key] for key in ("prompts", "hints", "recommended", "recommendation")}


def write_predictions(out: Path, prompts: int) -> None:
    """Write the predictions of all pools."""
    pools = {pool: predicted(pool, prompts) for pool in POOLS}
    harness.write(out, "hints_prediction", {"command": "python benchmarks/hints.py", "pools": pools})


def main() -> None:
    """Make the missing runs, and write the tables."""
    parser = harness.options(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="directory of the sweeps")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table of the existing pieces")
    parser.add_argument("--add", action="store_true", help="the same, added to the pieces in the results file")
    args = harness.parse(parser)
    if not (args.table or args.add):
        write_predictions(args.out, 8 if args.smoke else 256)
    for sweep, name in list(NAMES.items())[: 1 if args.smoke else None]:
        file, runs = sweeps.SWEEPS / f"{sweep}.yaml", args.runs / sweep
        if args.smoke:
            file, runs = sweeps.smoke_sweep(sweep, ("hinted",), args.out), args.out / "runs"
        if not (args.table or args.add):
            sweeps.run_sweep(file, runs)
        content, comparison = sweeps.added_to(name, runs) if args.add else sweeps.of_sweep(runs)
        sweeps.write(name, "python benchmarks/hints.py", content, comparison, args.out)


if __name__ == "__main__":
    main()
