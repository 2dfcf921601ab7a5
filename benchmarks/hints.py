"""Rescue in one's own words against a peer's words, against its controls, and against GRPO with the same tokens.

    python benchmarks/hints.py              # everything, forty minutes on 2 cores; resumes after an interruption
    python benchmarks/hints.py --table      # the table of the existing pieces
    python benchmarks/hints.py --seeds      # hints, a peer's words and GRPO on seven more seeds, pass@64; half an hour

It runs `mutualrl complementarity --hints` on the embedded pools `tiny-hints` and `tiny-countdown`, then `mutualrl sweep
benchmarks/sweeps/hints.yaml` on `tiny-hints`, and writes `benchmarks/results/hints.json` and `.md`, and
`hints_prediction.json`. `--seeds` runs `hints-seeds.yaml` alone. `hints_countdown.py` has the other pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import sweep_results as sweeps

COMMAND = "python benchmarks/hints.py"
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
    harness.write(out, "hints_prediction", {"command": COMMAND, "pools": pools})


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__)
    parser.add_argument("--seeds", action="store_true", help="seven more seeds, with pass@64")
    args = harness.parse(parser)
    if args.seeds:
        few = {"samples": 2, "limit": 2}
        sweeps.make("hints-seeds", f"{COMMAND} --seeds", args, ("hinted",), result="hints_seeds", evaluate=few)
        return

    def prepare(file: Path) -> None:
        write_predictions(args.out, 8 if args.smoke else 256)

    sweeps.make("hints", COMMAND, args, ("hinted",), prepare=prepare)


if __name__ == "__main__":
    main()
