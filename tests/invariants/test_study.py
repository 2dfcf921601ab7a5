"""Study's arithmetic by hand, and what its committed results say of themselves."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import REPOSITORY
from made_runs import made_run

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
    result = study.interval([0.1, 0.2, 0.3])
    assert result.mean == pytest.approx(0.2)
    assert result.high - result.mean == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert result.above is None
    assert study.interval([0.2, 0.21, 0.2, 0.2]).above is True
    assert study.interval([-0.2, -0.21, -0.2]).above is False
    assert math.isinf(study.interval([0.5]).high)
    assert study.interval([0.2, 0.2]).above is None  # two seeds decide nothing, however alike
    tied = study.interval([0.01, 0.01, 0.01], 1 / 64)
    assert (tied.low, tied.high) == (pytest.approx(0.01 - 1 / 64), pytest.approx(0.01 + 1 / 64))
    assert tied.above is None
    assert tied.within(0.05) is True
    assert study.interval([0.2, 0.21, 0.2]).within(0.05) is False
    assert study.interval([0.2, 0.21, 0.2]).over(0.3) is False
    assert study.verdict([True, True]) == "held"
    assert study.verdict([True, None]) == "not decided"
    assert study.verdict([True, None, False]) == "not held"
    assert study.verdict([]) == "not decided"


def piece(pool: str, arm: str, seed: int, after: float, entropy: float = 0.5) -> dict[str, Any]:
    details = {
        "before": {"all": 0.3, "+": 0.3},
        "after": {"all": after, "+": after},
        "curve": [[0, 0.3], [10, after]],
        "entropy": entropy,
        "kl": 0.1,
        "gate": [0.4, 0.1 + 0.01 * seed],
        "extra_tokens": 0.0,
        "seconds": 1.0,
    }
    return {
        "pool": pool,
        "arm": arm,
        "seed": seed,
        "policies": {"ada": details, "bob": {**details, "before": {"all": 0.2, "+": 0.2}}},
    }


def test_claims_follow_from_differences_paired_by_seed(study: ModuleType) -> None:
    pieces = [piece("tiny", "grpo", s, 0.4 + 0.1 * s) for s in range(3)]
    pieces += [piece("tiny", "sgt", s, 0.5 + 0.1 * s + 0.001 * s, entropy=0.6 + 0.001 * s) for s in range(3)]
    pieces += [piece("tiny", "prp", s, 0.35 + 0.1 * s + 0.001 * s, entropy=0.4 + 0.001 * s) for s in range(3)]
    pieces += [piece("tiny", "prp naive", s, 0.2 + 0.1 * s + 0.002 * s) for s in range(3)]
    pieces += [piece("tiny", "xgrpo", s, 0.4 + 0.1 * s + 0.001 * s) for s in range(3)]
    pieces += [piece("tiny", "grpo-noise", s, 0.5 + 0.1 * s - 0.001 * s) for s in range(3)]
    result = study.Study(pieces)
    verdicts = {claim.text: study.verdict(claim.answers) for claim in study.claims(result)}
    assert verdicts["SGT above GRPO, for every policy (final accuracy)"] == "held"  # though seeds spread far wider
    assert verdicts["SGT keeps entropy (not more than a quarter below GRPO's)"] == "held"
    assert verdicts["SGT keeps KL low (not more than a quarter above GRPO's)"] == "held"
    assert verdicts["PRP lowers the stronger policy's entropy"] == "held"
    assert verdicts["PRP raises the weaker policy's KL"] == "not decided"
    assert verdicts["PRP reduces the pool's mean accuracy"] == "held"
    assert verdicts["naive PRP below corrected PRP, for every policy"] == "held"
    assert verdicts["corrected PRP below GRPO for the weaker policy"] == "held"
    assert verdicts["XGRPO close to GRPO, or above it (not more than 0.05 below)"] == "held"
    assert verdicts["XGRPO above noise"] == "not held"
    assert verdicts["the gate shuts as the learner improves (last tenth of the run minus the first)"] == "held"
    assert "gains of SGT grow with heterogeneity (tiny minus tiny-near)" not in verdicts
    assert (result.weaker("tiny"), result.stronger("tiny")) == ("bob", "ada")
    assert study.reached(result, "tiny", "sgt", [0, 1, 2]) == "10, 10, 10"
    assert study.reached(result, "tiny", "prp", [0]) == "-"


def test_a_run_is_measured_by_hand(study: ModuleType, tmp_path: Path) -> None:
    created = study.Piece("tiny", "sgt", 1)
    run = made_run(created.directory(tmp_path), "sgt", seed=1, steps=25)
    for name in ("ada", "bob"):
        path = run / "policies" / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row |= {"completions/mean_length": 10.0, "sgt/extra_tokens": 16.0, "sgt/gate_rate": row["step"] / 100}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert created.done(tmp_path, 25)
    with pytest.raises(SystemExit, match="was made with --steps 25, not 160"):
        created.done(tmp_path, 160)
    result = study.measured(created, tmp_path)
    ada = result["policies"]["ada"]
    assert (result["steps"], result["seed"]) == (25, 1)
    assert ada["before"] == {"all": 0.3, "+": pytest.approx(0.4), "*": pytest.approx(0.2)}
    assert ada["after"]["all"] == pytest.approx(0.51)
    assert ada["extra_tokens"] == pytest.approx(16 / (10 * 8 * 4))  # of a round of 8 prompts and 4 rollouts
    assert ada["kl"] == pytest.approx(sum(0.01 * step for step in range(20, 26)) / 6)  # the last quarter
    assert len(ada["gate"]) == 10
    assert ada["gate"][0] == pytest.approx(0.015)  # steps 1 and 2
    assert ada["gate"][9] == pytest.approx(0.24)  # steps 23 to 25: the tenths cover all
    text = study.collect  # a study without plain GRPO has nothing to compare with
    with pytest.raises(SystemExit, match="no run of plain GRPO"):
        text(tmp_path, tmp_path / "out", [1])


def test_the_commands_of_the_arms_differ_in_the_regime_alone(study: ModuleType, tmp_path: Path) -> None:
    base = study.Piece("tiny", "grpo", 0).command(tmp_path, 160)
    for arm in study.ARMS:
        command = study.Piece("tiny", arm, 0).command(tmp_path, 160)
        new = [word for word in command if word not in base]
        assert all(word in study.ARMS[arm] or word.startswith(("regime.", str(tmp_path))) for word in new), new


@pytest.mark.skipif(not (RESULTS / "study.json").exists(), reason="the study has no results yet")
def test_the_committed_study_is_what_its_pieces_give(study: ModuleType) -> None:
    result = json.loads((RESULTS / "study.json").read_text())
    created = study.Study(result["pieces"])
    assert study.tables(created) == (RESULTS / "study.md").read_text().strip()
    assert [claim["verdict"] for claim in result["claims"]] == [study.verdict(c.answers) for c in study.claims(created)]
    for pool in study.POOLS:
        for arm in (*study.ARMS, *study.DISTILLED):
            assert len(created.seeds(pool, arm)) >= 3, (pool, arm)
    assert (RESULTS / "study_gains.png").exists()
