"""Rescue of agents: a peer's run with tools as a hint, against its controls, and against GRPO with the same tokens.

    python benchmarks/agents.py              # everything, twenty minutes on 2 cores; resumes after an interruption
    python benchmarks/agents.py --table      # the table of the existing pieces
    python benchmarks/agents.py --trajectories   # the run learnt itself, or replayed, against the plan; as long
    python benchmarks/agents.py --seeds          # seven more seeds of these; half an hour

It runs `mutualrl sweep benchmarks/sweeps/agents.yaml` (`agents-trajectories.yaml`, `agents-seeds.yaml`) on the embedded
pool `tiny-tools`, and writes `benchmarks/results/agents.json` and `.md` (or of the sweep's name).
"""

from __future__ import annotations

from pathlib import Path

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__, "agents")
    parser.add_argument("--add", action="store_true", help="the same, added to the pieces in the results file")
    parser.add_argument("--trajectories", action="store_true", help="sgt and guided on runs, against plans")
    parser.add_argument("--seeds", action="store_true", help="the same on seven more seeds")
    args = harness.parse(parser)
    name, command = "agents", "python benchmarks/agents.py"
    for part in ("trajectories", "seeds"):
        if getattr(args, part):
            name, command = f"agents-{part}", f"python benchmarks/agents.py --{part}"
    if name != "agents":
        args.runs = Path("runs") / name if args.runs == Path("runs") / "agents" else args.runs
    file = sweeps.SWEEPS / f"{name}.yaml"
    if args.smoke:
        file = sweeps.smoke_sweep(name, ("plan",), args.out)
        args.runs = args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, args.runs)
    content, comparison = sweeps.added_to(name, args.runs) if args.add else sweeps.of_sweep(args.runs)
    sweeps.write(name, command, content, comparison, args.out)


if __name__ == "__main__":
    main()
