"""Theorems of the paper about THL, checked on real alignments; each test is named after its theorem."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mutualrl.thl import (
    ANCHORS,
    BOUND,
    Alignment,
    align_logprobs,
    clipped_bias_bound,
    decode_completion,
    ratio_envelope,
    residual_bound,
    retokenize,
    second_moment_bound,
)
from thl_tokenizers import sentencepiece_like, synthetic

SENTENCES = [
    "So \\boxed{42} it is.\n",
    "Once upon a time there was a Number,  12 + 30 = 42.",
    "It costs 7 * 6 = 42 as well; and  MORE",
    "日本 time café e\u0301 12",
    "So it is",
    "a number",
    " ",
]
PAIRS = [
    ("ada", "bob"),
    ("bob", "sentencepiece"),
    ("sentencepiece", "lowercase"),
    ("unigram", "unigram-unk"),
    ("ada", "lowercase"),
]


Align = Callable[..., Alignment]


def cases() -> list[tuple[np.ndarray, Align]]:
    """Return traces, each with the function that aligns it: with and without EOS, with a special token inside, with
    changed text."""
    rng = random.Random(0)
    results: list[tuple[np.ndarray, Align]] = []
    for source, target in [(synthetic(a), synthetic(b)) for a, b in PAIRS]:
        for number, sentence in enumerate(SENTENCES):
            ids = list(retokenize(sentence, source).ids)
            if number % 3 == 0:
                ids.append(source.eos_token_id)
            if number % 3 == 1:
                ids.insert(len(ids) // 2, source.pad_token_id)
            text = decode_completion(ids, source)
            trace = -np.array([rng.expovariate(0.5) for _ in ids])

            def align(trace: np.ndarray, text=text, ids=ids, source=source, target=target, **kwargs: Any) -> Alignment:  # type: ignore[no-untyped-def]
                return align_logprobs(text, ids, trace, source, target, **kwargs)

            results.append((trace, align))
    return results


def alignments() -> list[tuple[np.ndarray, Alignment]]:
    """Return traces and their alignments under every anchor."""
    return [(trace, align(trace, anchor=anchor)) for trace, align in cases() for anchor in ANCHORS]


def aligned_sum(alignment: Alignment) -> float:
    return float(alignment.logprobs[alignment.covered].sum())


def test_thl_conservation() -> None:
    """Theorem "THL conservation with a derived residual bound", first display: L_mu - L~_mu = R."""
    for trace, alignment in alignments():
        assert trace.sum() - aligned_sum(alignment) == pytest.approx(alignment.residual, rel=1e-6, abs=1e-9)
    assert any(alignment.residual < -1 for _, alignment in alignments())


def test_thl_residual_bound() -> None:
    """The same theorem, second display: delta <= B C_mis; C_mis = 0 preserves the denominator."""
    for trace, alignment in alignments():
        assert trace.min() > -BOUND
        assert alignment.delta <= residual_bound(alignment.mismatched) + 1e-9
        assert alignment.mismatched <= len(trace)
        if alignment.mismatched == 0:
            assert aligned_sum(alignment) == pytest.approx(trace.sum())
    counts = {alignment.mismatched for _, alignment in alignments()}
    assert 0 in counts and max(counts) > 1


def test_thl_ratio_envelope() -> None:
    """Corollary "Importance-ratio envelope induced by THL": exp(-delta) rho <= rho~ <= exp(delta) rho."""
    rng = random.Random(1)
    for trace, alignment in alignments():
        learner = trace.sum() + rng.gauss(0, 3)
        ratio, aligned = math.exp(learner - trace.sum()), math.exp(learner - aligned_sum(alignment))
        low, high = ratio_envelope(alignment.residual)
        assert low * ratio <= aligned * (1 + 1e-9)
        assert aligned <= high * ratio * (1 + 1e-9)
        assert high == pytest.approx(math.exp(alignment.delta))
        assert aligned / ratio == pytest.approx(math.exp(alignment.residual), rel=1e-6)
    assert ratio_envelope(-1e6) == (0.0, math.inf)


def bandit() -> tuple[Any, ...]:
    """Return a learner and a peer on one prompt; the responses are texts of real tokenizers.

    mu: the peer's probabilities; each trace is scaled so that its log-probs sum to log mu. rho = pi / mu; rho~ divides
    pi by the aligned probability of the learner's tokens, so only `residual` relates it to the bounds.
    """
    rng = np.random.default_rng(2)
    responses = cases()
    mu = rng.dirichlet(np.full(len(responses), 5.0))
    pi = mu * np.exp(rng.normal(0, 0.7, len(responses)))
    pi /= pi.sum()
    sums, residuals = [], []
    for probability, (trace, align) in zip(mu, responses, strict=True):
        aligned = align(trace * math.log(probability) / trace.sum())
        sums.append(aligned_sum(aligned))
        residuals.append(aligned.residual)
    advantages = rng.uniform(-2, 2, len(mu))
    scores = rng.normal(size=(len(mu), 5))
    assert min(residuals) < 0
    ratio, aligned_ratio = pi / mu, pi / np.exp(sums)
    assert not np.allclose(ratio, aligned_ratio)
    return mu, ratio, aligned_ratio, advantages[:, None] * scores, advantages, scores, np.array(residuals)


def test_prp_clipped_bias_under_thl() -> None:
    """Theorem "PRP bias-variance decomposition": |g_clip,THL - g_clip| <= A_max G (exp(delta_bar) - 1)."""
    mu, ratio, aligned, h, advantages, scores, residuals = bandit()
    for epsilon in (0.1, 0.2, 0.5):
        difference = (mu * (np.clip(aligned, 1 - epsilon, 1 + epsilon) - np.clip(ratio, 1 - epsilon, 1 + epsilon))) @ h
        limit = clipped_bias_bound(
            np.abs(residuals).max(), np.abs(advantages).max(), np.linalg.norm(scores, axis=1).max()
        )
        assert 0 < np.linalg.norm(difference) <= limit


def test_prp_second_moment_under_thl() -> None:
    """The same theorem: E |rho~ h|^2 <= exp(2 delta_bar) A_max^2 G^2 (1 + chi^2)."""
    mu, ratio, aligned, h, advantages, scores, residuals = bandit()
    chi_square = float((mu * ratio**2).sum() - 1)
    moment = float((mu * aligned**2 * (h**2).sum(axis=1)).sum())
    limit = second_moment_bound(
        np.abs(residuals).max(), np.abs(advantages).max(), np.linalg.norm(scores, axis=1).max(), chi_square
    )
    assert 0 < moment <= limit
    assert second_moment_bound(0.0, 2.0, 3.0, 0.5) == 54.0
    assert clipped_bias_bound(math.log(2.0), 2.0, 3.0) == pytest.approx(6.0)


def test_refinement_preserves_every_word() -> None:
    """The same theorem, last display: with C_w > 0 the target tokens of a word carry the word's source mass."""
    source, target = synthetic("ada"), sentencepiece_like()
    text = "So it is 42 as well"
    ids = retokenize(text, source).ids
    trace = -np.arange(1.0, len(ids) + 1)
    aligned = align_logprobs(text, ids, trace, source, target, anchor="word")
    assert len(aligned.groups) == 6
    for group in aligned.groups:
        assert sum(aligned.logprobs[t] for t in group.target) == pytest.approx(sum(trace[s] for s in group.source))
