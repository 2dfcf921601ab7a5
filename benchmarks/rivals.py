"""Ways to teach beside their rivals: dynamic sampling, CHORD, HACPO, F-TIS, the least hint that works, more rollouts.

    python benchmarks/rivals.py              # everything, an hour on 2 cores; resumes after an interruption
    python benchmarks/rivals.py --table      # the table of the existing pieces
    python benchmarks/rivals.py --more recorded   # seven more seeds of one model with a file; half an hour
    python benchmarks/rivals.py --more tiny       # seven more seeds of two models; half an hour

It runs `mutualrl sweep benchmarks/sweeps/rivals.yaml` (or `rivals-recorded.yaml`, `rivals-tiny.yaml`), and writes
`benchmarks/results/rivals.json` and `.md` (or of the sweep's name).
"""

from __future__ import annotations

from pathlib import Path

import harness
import sweep_results as sweeps

COMMAND = "python benchmarks/rivals.py"


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__, "rivals")
    parser.add_argument("--more", choices=["recorded", "tiny"], help="seven more seeds of a pool")
    args = harness.parse(parser)
    name, command = "rivals", COMMAND
    if args.more is not None:
        name, command = f"rivals-{args.more}", f"{COMMAND} --more {args.more}"
        args.runs = Path("runs") / name if args.runs == Path("runs") / "rivals" else args.runs
    file = sweeps.SWEEPS / f"{name}.yaml"
    if args.smoke:
        file = sweeps.smoke_sweep("rivals", ("chord",), args.out, pools=["tiny-recorded"])
        args.runs = args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.of_sweep(args.runs)
    sweeps.write(name, command, content, comparison, args.out)


if __name__ == "__main__":
    main()
