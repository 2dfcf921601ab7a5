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
    args = harness.parse(sweeps.options(__doc__))
    sweeps.make("resample", "python benchmarks/resample.py", args, ("grpo", "resample"))


if __name__ == "__main__":
    main()
