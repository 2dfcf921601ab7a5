"""What sharing is worth on the embedded pools: every regime, its controls and sequential distillation, three pools.

    mutualrl sweep benchmarks/sweeps/study.yaml --out runs/study    # the runs, half an hour per seed on two cores
    python benchmarks/study.py --runs runs/study                    # benchmarks/results/study.{json,md}, its figures
    python benchmarks/study.py                                      # the same from the raw values in study.json

Each claim of sweeps/study-claims.yaml is asked by itself, without a correction for their number: these are the
questions of the first study. The paper's main claims, with more seeds and corrected, are `benchmarks/paper.py`'s.
"""

from __future__ import annotations

import sweep_results as sweeps

#: arms that others are compared with on the page, beside plain GRPO
REFERENCES = ("grpo", "sgt", "sgt gold", "prp", "grpo-noise", "xgrpo shuffled", "distilled", "distilled 5e-4")
PROBES = ("grpo", "xgrpo", "prp", "sgt")


if __name__ == "__main__":
    sweeps.page("study", __doc__, REFERENCES, PROBES)
