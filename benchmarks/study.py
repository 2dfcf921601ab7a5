"""What sharing is worth on the embedded pools: every regime, its controls and sequential distillation, three pools.

    mutualrl sweep benchmarks/sweeps/study.yaml --out runs/study    # the runs, half an hour per seed on two cores
    python benchmarks/study.py --runs runs/study                    # benchmarks/results/study.{json,md}, its figures
    python benchmarks/study.py                                      # the same from the raw values in study.json

Each claim of sweeps/study-claims.yaml is asked by itself, without a correction for their number: these are the
questions of the first study. The paper's main claims, with more seeds and corrected, are `benchmarks/paper.py`'s.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sweep_results as sweeps

#: arms that others are compared with on the page, beside plain GRPO
REFERENCES = ("grpo", "sgt", "sgt gold", "prp", "grpo-noise", "xgrpo shuffled", "distilled", "distilled 5e-4")
PROBES = ("grpo", "xgrpo", "prp", "sgt")


def main() -> None:
    """Write the results and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="directory of the sweep")
    given = parser.parse_args()
    claims = sweeps.SWEEPS / "study-claims.yaml"
    value, comparison = sweeps.of_sweep(given.runs) if given.runs else sweeps.of_results("study", claims)
    outcomes = sweeps.outcomes_of(value)
    value |= {"against": sweeps.differences(outcomes, REFERENCES), "gates": sweeps.gates(outcomes, "sgt")}
    sweeps.write("study", "python benchmarks/study.py", value, comparison)
    sweeps.draw([sweeps.curves(outcomes, "study_curves", PROBES), sweeps.gains(comparison, "study_gains")])


if __name__ == "__main__":
    main()
