"""The paper's noise control with advantages whitened over the round, where group scaling makes it collapse.

    python benchmarks/noise.py              # everything, forty minutes on 2 cores; resumes after an interruption
    python benchmarks/noise.py --table      # the table of the existing pieces

It runs `mutualrl sweep benchmarks/sweeps/noise-whitened.yaml`, and writes `benchmarks/results/noise-whitened.json` and
`.md`. The same control under group scaling: `python benchmarks/paper.py`.
"""

from __future__ import annotations

import harness
import sweep_results as sweeps


def main() -> None:
    """Make the missing runs, and write the table."""
    args = harness.parse(sweeps.options(__doc__))
    sweeps.make("noise-whitened", "python benchmarks/noise.py", args, ("noise",))


if __name__ == "__main__":
    main()
