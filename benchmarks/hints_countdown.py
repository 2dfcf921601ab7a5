"""The rule `hinted` where the policies have never seen a hint: it should neither help nor harm.

    python benchmarks/hints_countdown.py            # everything, ten minutes on 2 cores; resumes after an interruption
    python benchmarks/hints_countdown.py --table    # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/hints-countdown.yaml` on the embedded pool `tiny-countdown`, and writes
`benchmarks/results/hints_countdown.json` and `.md`.
"""

from __future__ import annotations

from pathlib import Path

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = harness.options(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "hints-countdown", help="directory of the sweep")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table of the existing pieces")
    args = harness.parse(parser)
    file = sweeps.SWEEPS / "hints-countdown.yaml"
    if args.smoke:
        file = sweeps.smoke_sweep("hints-countdown", ("hinted",), args.out)
        args.runs = args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.of_sweep(args.runs)
    sweeps.write("hints_countdown", "python benchmarks/hints_countdown.py", content, comparison, args.out)


if __name__ == "__main__":
    main()
