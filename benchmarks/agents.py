"""Rescue of agents: a peer's run with tools as a hint, against its controls, and against GRPO with the same tokens.

    python benchmarks/agents.py              # everything, twenty minutes on 2 cores; resumes after an interruption
    python benchmarks/agents.py --table      # the table of the existing pieces
    python benchmarks/agents.py --trajectories   # the run learnt itself, or replayed, against the plan; as long
    python benchmarks/agents.py --seeds          # seven more seeds of these; half an hour

It runs `mutualrl sweep benchmarks/sweeps/agents.yaml` (`agents-trajectories.yaml`, `agents-seeds.yaml`) on the embedded
pool `tiny-tools`, and writes `benchmarks/results/agents.json` and `.md` (or of the sweep's name).
"""

from __future__ import annotations

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--trajectories", action="store_const", dest="part", const="trajectories", help="runs, not plans")
    part.add_argument("--seeds", action="store_const", dest="part", const="seeds", help="the same on seven more seeds")
    args = harness.parse(parser)
    name, command = "agents", "python benchmarks/agents.py"
    if args.part is not None:
        name, command = f"agents-{args.part}", f"{command} --{args.part}"
    sweeps.make(name, command, args, ("plan",))


if __name__ == "__main__":
    main()
