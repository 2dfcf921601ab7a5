"""The study's arithmetic by hand, and what its committed results say of themselves."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from types import ModuleType
from typing import Any

import pytest

from conftest import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study", REPOSITORY / "benchmarks" / "study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["study"] = module
    spec.loader.exec_module(module)
    return module


def test_intervals_and_verdicts_by_hand(study: ModuleType) -> None:
    found = study.interval([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2)
    assert found.high - found.mean == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert found.above is None
    assert study.interval([0.2, 0.21, 0.2, 0.2]).above is True
    assert study.interval([-0.2, -0.21, -0.2]).above is False
    assert math.isinf(study.interval([0.5]).high)
    assert study.verdict([True, True]) == "held"
    assert study.verdict([True, None]) == "not decided"
    assert study.verdict([True, None, False]) == "not held"
    assert study.verdict([]) == "not decided"


def piece(pool: str, arm: str, seed: int, after: float, entropy: float = 0.5) -> dict[str, Any]:
    about = {
        "before": {"all": 0.3, "+": 0.3}, "after": {"all": after, "+": after}, "curve": [[0, 0.3], [10, after]],
        "entropy": entropy, "kl": 0.1, "gate": [0.4, 0.1 + 0.01 * seed], "extra_tokens": 0.0, "seconds": 1.0,
    }  # fmt: skip
    return {
        "pool": pool,
        "arm": arm,
        "seed": seed,
        "policies": {"ada": about, "bob": {**about, "before": {"all": 0.2, "+": 0.2}}},
    }


def test_claims_follow_from_differences_paired_by_seed(study: ModuleType) -> None:
    pieces = [piece("tiny", "grpo", s, 0.4 + 0.1 * s) for s in range(3)]
    pieces += [piece("tiny", "sgt", s, 0.5 + 0.1 * s + 0.001 * s, entropy=0.6 + 0.001 * s) for s in range(3)]
    pieces += [piece("tiny", "prp", s, 0.35 + 0.1 * s + 0.001 * s, entropy=0.4 + 0.001 * s) for s in range(3)]
    pieces += [piece("tiny", "prp naive", s, 0.2 + 0.1 * s + 0.002 * s) for s in range(3)]
    pieces += [piece("tiny", "xgrpo", s, 0.4 + 0.1 * s + 0.001 * s) for s in range(3)]
    pieces += [piece("tiny", "grpo-noise", s, 0.5 + 0.1 * s - 0.001 * s) for s in range(3)]
    found = study.Study(pieces)
    verdicts = {claim.text: study.verdict(claim.answers) for claim in study.claims(found)}
    assert verdicts["SGT above GRPO, for every policy (final accuracy)"] == "held"  # though seeds spread far wider
    assert verdicts["SGT keeps entropy (above GRPO's)"] == "held"
    assert verdicts["PRP lowers entropy"] == "held"
    assert verdicts["naive PRP below corrected PRP"] == "held"
    assert verdicts["corrected PRP below GRPO for the weaker policy"] == "held"
    assert verdicts["XGRPO close to GRPO (within 0.05)"] == "held"
    assert verdicts["XGRPO above its control grpo-noise"] == "not held"
    assert verdicts["the gate shuts as the learner improves (last tenth of the run minus the first)"] == "held"
    assert "gains of SGT grow with heterogeneity (tiny minus tiny-near)" not in verdicts
    assert found.weaker("tiny") == "bob"
    assert study.reached(found, "tiny", "sgt", [0, 1, 2]) == "10, 10, 10"
    assert study.reached(found, "tiny", "prp", [0]) == "-"


@pytest.mark.skipif(not (RESULTS / "study.json").exists(), reason="the study has no results yet")
def test_the_committed_study_is_what_its_pieces_give(study: ModuleType) -> None:
    found = json.loads((RESULTS / "study.json").read_text())
    made = study.Study(found["pieces"])
    assert study.tables(made) == (RESULTS / "study.md").read_text().strip()
    assert [claim["verdict"] for claim in found["claims"]] == [study.verdict(c.answers) for c in study.claims(made)]
    for pool in study.POOLS:
        for arm in (*study.ARMS, *study.DISTILLED):
            assert len(made.seeds(pool, arm)) >= 3, (pool, arm)
    assert (RESULTS / "study-gains.png").exists()
