"""Rescue in one's own words against a peer's words, against its controls, and against GRPO with the same tokens.

    python benchmarks/hints.py              # everything, an hour on 2 cores; resumes after an interruption
    python benchmarks/hints.py --table      # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/hints.yaml` on the embedded pool `tiny-hints`, and `hints-countdown.yaml` on
`tiny-countdown`, whose policies cannot use a hint; and writes `benchmarks/results/hints.json` and
`hints_countdown.json`, with tables.
"""

from __future__ import annotations

from pathlib import Path

import harness
import sweep_results as sweeps

#: results by sweep
NAMES = {"hints": "hints", "hints-countdown": "hints_countdown"}


def main() -> None:
    """Make the missing runs, and write the tables."""
    parser = harness.options(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="directory of the sweeps")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table of the existing pieces")
    parser.add_argument("--add", action="store_true", help="the same, added to the pieces in the results file")
    args = harness.parse(parser)
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
