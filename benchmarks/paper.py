"""The paper's main claims: SGT above XGRPO, above PRP, above GRPO; noise below GRPO. Registered, corrected by Holm.

    mutualrl sweep benchmarks/sweeps/paper.yaml --out runs/paper    # the runs, a minute per piece on two cores
    python benchmarks/paper.py --runs runs/paper                    # benchmarks/results/paper.{json,md}, its figures
    python benchmarks/paper.py                                      # the same from the raw values in paper.json

The claims of sweeps/paper-claims.yaml were written before the runs. PRP is asked with TRL's two-sided surrogate, as the
paper trains, and with the band of its theory; noise as the paper has it, and in a milder form that leaves groups of
equal rewards alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sweep_results as sweeps

#: arms that others are compared with on the page
REFERENCES = ("grpo", "sgt", "xgrpo", "prp", "prp band")
ARMS = ("grpo", "xgrpo", "prp", "noise", "sgt")


def main() -> None:
    """Write the results and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="directory of the sweep")
    given = parser.parse_args()
    claims = sweeps.SWEEPS / "paper-claims.yaml"
    value, comparison = sweeps.of_sweep(given.runs) if given.runs else sweeps.of_results("paper", claims)
    outcomes = sweeps.outcomes_of(value)
    value |= {"against": sweeps.differences(outcomes, REFERENCES), "gates": sweeps.gates(outcomes, "sgt")}
    sweeps.write("paper", "python benchmarks/paper.py", value, comparison)
    sweeps.draw([sweeps.curves(outcomes, "paper_curves", ARMS), sweeps.gains(comparison, "paper_gains")])


if __name__ == "__main__":
    main()
