"""Ways to teach beside their rivals: dynamic sampling, CHORD, HACPO, F-TIS, the least hint that works, more rollouts.

    python benchmarks/rivals.py              # everything, an hour on 2 cores; resumes after an interruption
    python benchmarks/rivals.py --table      # the table of the existing pieces
    python benchmarks/rivals.py --more recorded   # seven more seeds of one model with a file; half an hour
    python benchmarks/rivals.py --more tiny       # seven more seeds of two models; half an hour

It runs `mutualrl sweep benchmarks/sweeps/rivals.yaml` (or `rivals-recorded.yaml`, `rivals-tiny.yaml`), and writes
`benchmarks/results/rivals.json` and `.md` (or of the sweep's name).
"""

from __future__ import annotations

import harness
import sweep_results as sweeps

COMMAND = "python benchmarks/rivals.py"


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__)
    parser.add_argument("--more", choices=["recorded", "tiny"], help="seven more seeds of a pool")
    args = harness.parse(parser)
    if args.more is None or args.smoke:
        sweeps.make("rivals", COMMAND, args, ("chord",), pools=["tiny-recorded"])
    else:
        sweeps.make(f"rivals-{args.more}", f"{COMMAND} --more {args.more}", args, ())


if __name__ == "__main__":
    main()
