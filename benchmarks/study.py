"""Effect of sharing on the embedded pools: every regime, its controls and sequential distillation, three pools.

    mutualrl sweep benchmarks/sweeps/study.yaml --out runs/study    # the runs, half an hour per seed on two cores
    python benchmarks/study.py --runs runs/study                    # benchmarks/results/study.{json,md}, its figures
    python benchmarks/study.py                                      # the same from the raw values in study.json

Each claim of sweeps/study-claims.yaml is tested individually, without a correction for their number, as in the first
study. The paper's main claims, with more seeds and corrected, are in `benchmarks/paper.py`.
"""

from __future__ import annotations

import sweep_results as sweeps

#: reference arms of the page's comparisons, plain GRPO first
REFERENCES = ("grpo", "sgt", "sgt gold", "prp", "grpo-noise", "xgrpo shuffled", "distilled", "distilled 5e-4")
PROBES = ("grpo", "xgrpo", "prp", "sgt")


if __name__ == "__main__":
    sweeps.page("study", __doc__, REFERENCES, PROBES)
