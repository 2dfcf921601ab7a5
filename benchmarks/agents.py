"""Rescue of agents: a peer's run with tools as a hint, against its controls, and against GRPO with the same tokens.

    python benchmarks/agents.py              # everything, twenty minutes on 2 cores; resumes after an interruption
    python benchmarks/agents.py --table      # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/agents.yaml` on the embedded pool `tiny-tools`, and writes
`benchmarks/results/agents.json` and `.md`.
"""

from __future__ import annotations

import harness
import sweep_results as sweeps

COMMAND = "python benchmarks/agents.py"


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__, "agents")
    parser.add_argument("--add", action="store_true", help="the same, added to the pieces in the results file")
    args = harness.parse(parser)
    file = sweeps.SWEEPS / "agents.yaml"
    if args.smoke:
        file = sweeps.smoke_sweep("agents", ("plan",), args.out)
        args.runs = args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.added_to("agents", args.runs) if args.add else sweeps.of_sweep(args.runs)
    sweeps.write("agents", COMMAND, content, comparison, args.out)


if __name__ == "__main__":
    main()
