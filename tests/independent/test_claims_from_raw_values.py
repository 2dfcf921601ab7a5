"""Three claims recomputed from the raw values in result files, by code that imports nothing of the project."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CLAIMS = [
    ("agents-trajectories", "tiny-tools", "sgt", "grpo", "sgt ends above GRPO"),
    ("paper", "tiny", "sgt", "grpo", None),
    ("text_source", "text-source-pool.yaml", "sgt", "grpo", None),
]


def student_cdf(t: float, df: int) -> float:
    """Integrate Student's density with Simpson's rule over (0, |t|)."""
    constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    steps, width = 20_000, abs(t) / 20_000
    total = 0.0
    for place in range(steps + 1):
        weight = 1 if place in (0, steps) else 4 if place % 2 else 2
        total += weight * (1 + (place * width) ** 2 / df) ** (-(df + 1) / 2)
    half = constant * total * width / 3
    return 0.5 + math.copysign(half, t)


def critical(df: int) -> float:
    """Bisect for the 97.5th percentile."""
    low, high = 0.0, 100.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < 0.975 else (low, middle)
    return low


@pytest.mark.parametrize(("file", "pool", "one", "other", "claim"), CLAIMS)
def test_interval_and_p_value_follow_from_the_raw_accuracies(
    file: str, pool: str, one: str, other: str, claim: str | None
) -> None:
    content = json.loads((RESULTS / f"{file}.json").read_text())
    accuracy: dict[tuple[str, int], float] = {}
    for piece in content["pieces"]:
        if piece["pool"] == pool:
            values = [policy["after"]["all"] for policy in piece["policies"].values()]
            accuracy[piece["arm"], piece["seed"]] = sum(values) / len(values)
    seeds = sorted(seed for arm, seed in accuracy if arm == one and (other, seed) in accuracy)
    differences = [accuracy[one, seed] - accuracy[other, seed] for seed in seeds]
    n, mean = len(differences), sum(differences) / len(differences)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in differences) / (n - 1))
    half = critical(n - 1) * deviation / math.sqrt(n)
    stored = content["comparison"]["differences"][pool][one]["accuracy"]
    assert (stored["n"], n) == (n, stored["n"])
    assert n >= 3
    assert stored["mean"] == pytest.approx(mean, abs=1e-9)
    assert (stored["low"], stored["high"]) == pytest.approx((mean - half, mean + half), abs=1e-6)
    if claim is not None:
        (found,) = [each for each in content["comparison"]["claims"] if each["claim"] == claim]
        one_sided = 1 - student_cdf(mean / (deviation / math.sqrt(n)), n - 1)
        assert found["verdict"] == "held"
        assert found["p"] >= one_sided  # corrected over the family
        assert found["p"] <= len(content["comparison"]["claims"]) * one_sided + 1e-6
