"""The paper's main claims: SGT above XGRPO, above PRP, above GRPO; noise below GRPO. Registered, corrected by Holm.

    mutualrl sweep benchmarks/sweeps/paper.yaml --out runs/paper    # the runs, a minute per piece on two cores
    python benchmarks/paper.py --runs runs/paper                    # benchmarks/results/paper.{json,md}, its figures
    python benchmarks/paper.py                                      # the same from the raw values in paper.json

The claims of sweeps/paper-claims.yaml were written before the runs. PRP is asked with TRL's two-sided surrogate, as the
paper trains, and with the band of its theory; noise as the paper has it, and in a milder form that leaves groups of
equal rewards alone.
"""

from __future__ import annotations

import sweep_results as sweeps

#: arms that others are compared with on the page
REFERENCES = ("grpo", "sgt", "xgrpo", "prp", "prp band")
ARMS = ("grpo", "xgrpo", "prp", "noise", "sgt")


if __name__ == "__main__":
    sweeps.page("paper", __doc__, REFERENCES, ARMS)
