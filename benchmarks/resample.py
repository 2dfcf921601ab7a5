"""Dynamic sampling (`round.resample`) against plain GRPO, with equal steps and with equal sampled tokens.

    python benchmarks/resample.py            # everything, half an hour on 2 cores; resumes after an interruption
    python benchmarks/resample.py --table    # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/resample.yaml` on the embedded pools `tiny` and `tiny-countdown`, and writes
`benchmarks/results/resample.json` and `.md`.
"""

from __future__ import annotations

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__, "resample")
    args = harness.parse(parser)
    file = sweeps.SWEEPS / "resample.yaml"
    if args.smoke:
        file, args.runs = sweeps.smoke_sweep("resample", ("grpo", "resample"), args.out), args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.of_sweep(args.runs)
    sweeps.write("resample", "python benchmarks/resample.py", content, comparison, args.out)


if __name__ == "__main__":
    main()
