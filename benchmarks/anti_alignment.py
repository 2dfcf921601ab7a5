"""Pooling in the paper's three-action bandit (Proposition "Naive PRP can be anti-aligned").

    python benchmarks/anti_alignment.py          # seconds

For each eta, computes the cosine between the learner's on-policy GRPO direction and those of: the peer's rows alone
with the paper's baseline and the learner's snapshot as denominator (the proposition); the peer's rows alone, and the
whole pool, with our pooled advantages, under each denominator and clip. Expectations are exact. Writes
benchmarks/results/anti_alignment.{json,md}.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

import harness
from mutualrl.regimes.losses import band_loss

Vector = npt.NDArray[np.float64]
REWARDS = np.array([1.0, 0.0, 0.0])


def direction(pi: Vector, sampler: Vector, behaviour: Vector, advantages: Vector, low: float, high: float) -> Vector:
    """Return E over `sampler` of clip(pi / behaviour) * A * score, by our `band_loss`."""
    logits = torch.tensor(np.log(pi), requires_grad=True)
    logps = torch.log_softmax(logits, 0)[:, None]
    loss = band_loss(logps, torch.tensor(np.log(behaviour))[:, None], torch.tensor(advantages)[:, None], low, high)
    (loss[:, 0] * torch.tensor(sampler)).sum().backward()
    assert logits.grad is not None
    gradient: npt.NDArray[np.float64] = logits.grad.numpy()
    return -gradient


def cosine(a: Vector, b: Vector) -> float:
    """Return the cosine of the angle between two directions."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def row(eta: float) -> dict[str, float]:
    """Return all cosines for one eta."""
    pi, mu = np.array([1 / 3, 2 / 3 - eta, eta]), np.array([eta, eta, 1 - 2 * eta])
    mixture = (pi + mu) / 2
    mean = float(mixture @ REWARDS)
    pooled = (REWARDS - mean) / (math.sqrt(float(mixture @ (REWARDS - mean) ** 2)) + 1e-4)
    on_policy = direction(pi, pi, pi, REWARDS - 1 / 3, 1.0, math.inf)
    own_rows = direction(pi, pi, pi, pooled, 1.0, math.inf)
    snapshot_rows = direction(pi, mu, pi, pooled, 0.2, 0.2)
    peer_rows = direction(pi, mu, mu, pooled, 1.0, math.inf)
    band_rows = direction(pi, mu, mu, pooled, 0.2, 0.2)
    return {
        "eta": eta,
        "paper's baseline, peer rows, snapshot": cosine(on_policy, direction(pi, mu, pi, REWARDS - 1 / 3, 0.2, 0.2)),
        "peer rows, snapshot": cosine(on_policy, snapshot_rows),
        "peer rows, peer": cosine(on_policy, peer_rows),
        "peer rows, peer, band": cosine(on_policy, band_rows),
        "pool, snapshot": cosine(on_policy, own_rows + snapshot_rows),
        "pool, peer": cosine(on_policy, own_rows + peer_rows),
        "pool, peer, band": cosine(on_policy, own_rows + band_rows),
    }


def main() -> None:
    """Compute, print and write."""
    parser = harness.options(__doc__)
    args = harness.parse(parser)
    rows = [row(eta) for eta in (0.001, 0.01, 0.02, 0.04)]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for cosines in rows:
        cells = [f"{cosines['eta']:g}", *(f"{value:.2f}" for key, value in cosines.items() if key != "eta")]
        lines.append("| " + " | ".join(cells) + " |")
    result = {"command": "python benchmarks/anti_alignment.py", "rows": rows}
    harness.write(args.out, "anti_alignment", result, "\n".join(lines))


if __name__ == "__main__":
    main()
