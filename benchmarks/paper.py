"""Main claims of the paper: SGT above XGRPO, above PRP, above GRPO; noise below GRPO. Registered, corrected by Holm.

    mutualrl sweep benchmarks/sweeps/paper.yaml --out runs/paper    # the runs, one to two minutes each on two cores
    python benchmarks/paper.py --runs runs/paper                    # benchmarks/results/paper.{json,md}, its figures
    python benchmarks/paper.py                                      # the same from the raw values in paper.json
    mutualrl sweep benchmarks/sweeps/paper-countdown.yaml --out runs/paper-countdown    # its third pool by itself
    python benchmarks/paper.py --runs runs/paper-countdown --add                        # added to paper.json

The claims of sweeps/paper-claims.yaml were written before the runs, except seeds 0 to 2 of five arms: these are
runs of the first study (study.py), whose results were known. The second table of claims leaves them out. The third
pool, `tiny-countdown`, was registered with them, left out before the first runs, and run later. PRP is tested
with TRL's two-sided surrogate, as in the paper's training, and with the band of its theory; noise as in the paper, and
in a milder form that exempts groups of equal rewards.
"""

from __future__ import annotations

import sweep_results as sweeps

#: reference arms of the page's comparisons
REFERENCES = ("grpo", "sgt", "xgrpo", "prp", "prp band")
ARMS = ("grpo", "xgrpo", "prp", "noise", "sgt")


if __name__ == "__main__":
    sweeps.page("paper", __doc__, REFERENCES, ARMS, earlier="study")
