"""Bounds on the effect of a residual on importance ratios: the quantities of the paper's THL theorem and corollaries.

Source: paper, Theorem "THL conservation with a derived residual bound", Corollary "Importance-ratio envelope induced by
THL", Theorem "PRP bias-variance decomposition" (its last two displays). With R = L_mu - L~_mu the residual,
delta = |R|, rho = exp(L - L_mu) the ideal ratio and rho~ = exp(L - L~_mu) the aligned one: rho~ / rho = exp(R).
"""

from __future__ import annotations

import math

from mutualrl.thl.align import BOUND


def residual_bound(mismatched: int, bound: float = BOUND) -> float:
    """Return B * C_mis, nats: an upper bound on delta, if no source log-prob is below -B."""
    return bound * mismatched


def ratio_envelope(residual: float) -> tuple[float, float]:
    """Return (exp(-delta), exp(delta)), the bounds on aligned ratio / ideal ratio; inf on overflow."""
    delta = abs(residual)
    return _exp(-delta), _exp(delta)


def clipped_bias_bound(delta_bar: float, advantage: float, score: float) -> float:
    """Return A_max * G * (exp(delta_bar) - 1), a bound on the bias that alignment adds to the clipped PRP estimator.

    `delta_bar` bounds delta over all responses, `advantage` bounds |A|, `score` bounds the norm of the score function.
    """
    return advantage * score * (_exp(delta_bar) - 1.0)


def second_moment_bound(delta_bar: float, advantage: float, score: float, chi_square: float) -> float:
    """Return exp(2 * delta_bar) * A_max^2 * G^2 * (1 + chi^2), a bound on the unclipped aligned estimator's second
    moment."""
    return _exp(2 * delta_bar) * advantage**2 * score**2 * (1.0 + chi_square)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
