"""The rule `hinted` where the policies have never seen a hint: it should neither help nor harm.

    python benchmarks/hints_countdown.py            # everything, ten minutes on 2 cores; resumes after an interruption
    python benchmarks/hints_countdown.py --controls # its controls: half an hour
    python benchmarks/hints_countdown.py --table    # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/hints-countdown.yaml` on the embedded pool `tiny-countdown`, and writes
`benchmarks/results/hints_countdown.json` and `.md`; with `--controls` `hints-countdown-controls.yaml` and
`hints_countdown_controls.json`.
"""

from __future__ import annotations

from pathlib import Path

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = harness.options(__doc__)
    parser.add_argument("--controls", action="store_true", help="the controls: no hint, other hints, more rollouts")
    parser.add_argument("--runs", type=Path, help="directory of the sweep; default: its name in runs/")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table of the existing pieces")
    args = harness.parse(parser)
    name = "hints-countdown-controls" if args.controls else "hints-countdown"
    file, runs = sweeps.SWEEPS / f"{name}.yaml", args.runs or Path("runs") / name
    if args.smoke:
        file, runs = sweeps.smoke_sweep(name, ("hinted",), args.out), args.out / "runs"
    if not args.table:
        sweeps.run_sweep(file, runs)
    content, comparison = sweeps.of_sweep(runs)
    command = "python benchmarks/hints_countdown.py" + (" --controls" if args.controls else "")
    sweeps.write(name.replace("-", "_"), command, content, comparison, args.out)


if __name__ == "__main__":
    main()
