"""The rule `hinted` where the policies have never seen a hint: it should neither help nor harm.

    python benchmarks/hints_countdown.py            # everything, ten minutes on 2 cores; resumes after an interruption
    python benchmarks/hints_countdown.py --controls # its controls: half an hour
    python benchmarks/hints_countdown.py --table    # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/hints-countdown.yaml` on the embedded pool `tiny-countdown`, and writes
`benchmarks/results/hints_countdown.json` and `.md`; with `--controls` `hints-countdown-controls.yaml` and
`hints_countdown_controls.json`.
"""

from __future__ import annotations

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    parser = sweeps.options(__doc__)
    parser.add_argument("--controls", action="store_true", help="the controls: no hint, other hints, more rollouts")
    args = harness.parse(parser)
    name, command = "hints-countdown", "python benchmarks/hints_countdown.py"
    if args.controls:
        name, command = "hints-countdown-controls", f"{command} --controls"
    sweeps.make(name, command, args, ("hinted",), result=name.replace("-", "_"))


if __name__ == "__main__":
    main()
