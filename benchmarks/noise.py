"""The paper's noise control with advantages whitened over the round, where group scaling makes it collapse.

    python benchmarks/noise.py              # everything, twenty minutes on 2 cores; resumes after an interruption
    python benchmarks/noise.py --table      # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/noise-whitened.yaml`, and writes `benchmarks/results/noise-whitened.json` and
`.md`. The same control under group scaling: `python benchmarks/paper.py`.
"""

from __future__ import annotations

import harness
import sweep_results as sweeps

NAME, COMMAND = "noise-whitened", "python benchmarks/noise.py"


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__, NAME)
    args = harness.parse(parser)
    file = sweeps.SWEEPS / f"{NAME}.yaml"
    if args.smoke:
        file = sweeps.smoke_sweep(NAME, ("noise",), args.out)
        args.runs = args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.of_sweep(args.runs)
    sweeps.write(NAME, COMMAND, content, comparison, args.out)


if __name__ == "__main__":
    main()
