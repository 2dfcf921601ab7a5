"""Ways to teach beside their rivals: dynamic sampling, CHORD, HACPO, F-TIS, the least hint that works, more rollouts.

    python benchmarks/rivals.py              # everything, an hour on 2 cores; resumes after an interruption
    python benchmarks/rivals.py --table      # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/rivals.yaml`, and writes `benchmarks/results/rivals.json` and `.md`.
"""

from __future__ import annotations

import harness
import sweep_results as sweeps

COMMAND = "python benchmarks/rivals.py"


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__, "rivals")
    args = harness.parse(parser)
    file = sweeps.SWEEPS / "rivals.yaml"
    if args.smoke:
        file = sweeps.smoke_sweep("rivals", ("chord",), args.out, pools=["tiny-recorded"])
        args.runs = args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.of_sweep(args.runs)
    sweeps.write("rivals", COMMAND, content, comparison, args.out)


if __name__ == "__main__":
    main()
