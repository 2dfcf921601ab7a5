"""The paper's theorems (Appendix "Theoretical analysis of the three communication channels") on our functions.

One prompt is a bandit with a softmax over logits z: the score of action a is e_a - pi. Expectations are exact sums
over all actions, or over all groups of actions, unless a test simulates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mutualrl.regimes import Plan, Regime
from mutualrl.regimes.gating import gate
from mutualrl.regimes.losses import band_loss, nll_loss, row_nll
from mutualrl.regimes.prp import PRP
from mutualrl.regimes.sgt import SGT
from mutualrl.regimes.xgrpo import XGRPO
from regime_views import Peer, plan, view

Vector = npt.NDArray[np.float64]
ESTIMATOR = XGRPO(mix=1, length_correction=0, scale="none", baseline="leave_one_out", advantage_clip=None)


def softmax(z: Sequence[float]) -> Vector:
    e = np.exp(np.array(z, dtype=np.float64) - max(z))
    return e / e.sum()


def scores(pi: Vector) -> npt.NDArray[np.float64]:
    """Return a matrix whose row a is the score of action a."""
    return np.eye(len(pi)) - pi


def band_estimator(z: Sequence[float], mu: Vector, advantages: Vector, low: float, high: float) -> Vector:
    """Return the expectation over mu of the descent direction of our `band_loss`."""
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    logps = torch.log_softmax(logits, 0)[:, None]
    loss = band_loss(logps, torch.tensor(np.log(mu))[:, None], torch.tensor(advantages)[:, None], low, high)
    (loss[:, 0] * torch.tensor(mu)).sum().backward()
    assert logits.grad is not None
    return -logits.grad.numpy()


logits = st.lists(st.floats(-2, 2), min_size=3, max_size=3)
values = st.lists(st.floats(-2, 2), min_size=3, max_size=3)


@given(logits, logits, values)
def test_theorem_prp_bias_variance_unbiased_under_coverage(z: list[float], m: list[float], a: list[float]) -> None:
    pi, mu, advantages = softmax(z), softmax(m), np.array(a)
    unclipped = band_estimator(z, mu, advantages, low=1.0, high=math.inf)
    assert unclipped == pytest.approx((pi * advantages) @ scores(pi), abs=1e-9)


@given(logits, logits, values)
def test_theorem_prp_bias_variance_chi_square_bound(z: list[float], m: list[float], a: list[float]) -> None:
    pi, mu, advantages = softmax(z), softmax(m), np.array(a)
    terms = [band_estimator(z, mu, np.where(np.arange(3) == i, advantages, 0.0), 1.0, math.inf) for i in range(3)]
    sampled = np.stack(terms) / mu[:, None]  # rho * h of each action: its term of the expectation / its probability
    rho, g_pi = pi / mu, np.sum(terms, axis=0)
    variance = (mu * ((sampled - g_pi) ** 2).sum(axis=1)).sum()
    a_max, g = np.abs(advantages).max(), np.linalg.norm(scores(pi), axis=1).max()
    chi = (mu * rho**2).sum() - 1
    assert variance <= a_max**2 * g**2 * (1 + chi) + 1e-9


@given(logits, logits, values, st.floats(0.01, 0.9))
def test_theorem_prp_bias_variance_clipping_bias_and_second_moment(
    z: list[float], m: list[float], a: list[float], eps: float
) -> None:
    pi, mu, advantages = softmax(z), softmax(m), np.array(a)
    rho, a_max, g = pi / mu, np.abs(advantages).max(), np.linalg.norm(scores(pi), axis=1).max()
    clipped = band_estimator(z, mu, advantages, eps, eps)
    bias = np.linalg.norm(clipped - (pi * advantages) @ scores(pi))
    tail = (mu * (np.maximum(rho - (1 + eps), 0) + np.maximum((1 - eps) - rho, 0))).sum()
    assert bias <= a_max * g * tail + 1e-9
    second = 0.0
    for i in range(3):  # estimator of one sampled action: its term of the expectation / its probability
        alone = np.where(np.arange(3) == i, advantages, 0.0)
        second += mu[i] * float((band_estimator(z, mu, alone, eps, eps) ** 2).sum()) / mu[i] ** 2
    assert second <= (1 + eps) ** 2 * a_max**2 * g**2 + 1e-9


@pytest.mark.parametrize("eta", [0.001, 0.01, 0.02, 0.04])
def test_proposition_naive_pooling_can_be_anti_aligned(eta: float) -> None:
    """Use the paper's baseline. The snapshot denominator makes every ratio 1, whichever policy sampled."""
    pi, mu = np.array([1 / 3, 2 / 3 - eta, eta]), np.array([eta, eta, 1 - 2 * eta])
    z, advantages = np.log(pi).tolist(), np.array([2 / 3, -1 / 3, -1 / 3])
    rows = plan(view([("p", 1.0), ("p", 0.0)], {"bob": Peer([("p", 1.0, "a")])}), PRP(denominator="snapshot")).rows
    assert rows[0].logprobs is None  # no peer denominator: the learner's own log-probs are used
    on = band_estimator(z, pi, advantages, 0.2, 0.2)
    naive = sum(
        mu[i] * band_estimator(z, pi, np.where(np.arange(3) == i, advantages, 0.0), 0.2, 0.2) / pi[i] for i in range(3)
    )
    inner = float(on @ naive)
    assert inner == pytest.approx(2 / 3 * eta**3 - eta**2 + 5 / 9 * eta - 2 / 81)
    assert inner < 0
    assert (mu * (pi / mu) ** 2).sum() - 1 > 0.4 / eta  # the chi-square distance diverges like 1 / eta


def groups_of(pi: Vector, size: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return every group of `size` actions with its probability."""
    return [(float(np.prod(pi[list(group)])), group) for group in itertools.product(range(len(pi)), repeat=size)]


def xgrpo_gradient(own: Sequence[int], peer_rewards: Sequence[float], rewards: Vector, pi: Vector) -> Vector:
    """Return (1/K) sum of A_i * score_i with our XGRPO advantages."""
    peers = {"bob": Peer([("p", r) for r in peer_rewards])}
    advantages = plan(view([("p", rewards[a]) for a in own], peers), ESTIMATOR).advantages
    assert advantages is not None
    return (np.array(advantages)[:, None] * scores(pi)[list(own)]).mean(axis=0)


@settings(max_examples=10)
@given(logits, logits, values)
def test_lemma_pooled_baselines_are_unbiased(z: list[float], m: list[float], r: list[float]) -> None:
    pi, mu, rewards = softmax(z), softmax(m), np.array(r)
    total = np.zeros(3)
    for p, own in groups_of(pi, 2):
        for q, peer in groups_of(mu, 2):
            total += p * q * xgrpo_gradient(own, rewards[list(peer)].tolist(), rewards, pi)
    assert total == pytest.approx((pi * rewards) @ scores(pi), abs=1e-9)


def second_moment(baseline: float, rewards: Vector, pi: Vector) -> float:
    """Return Var((r - b) s) + |g|^2 for a fixed baseline b, from plans of single rollouts with peers of mean b."""
    total = 0.0
    for action, probability in enumerate(pi):
        peers = {"bob": Peer([("p", baseline - 1.0), ("p", baseline + 1.0)])}  # the leave-one-out mean is b
        advantages = plan(view([("p", rewards[action])], peers), ESTIMATOR).advantages
        assert advantages is not None
        assert advantages[0] == pytest.approx(rewards[action] - baseline)
        total += probability * float(((advantages[0] * scores(pi)[action]) ** 2).sum())
    return total


@settings(max_examples=25)
@given(st.lists(logits, min_size=2, max_size=2), values, st.floats(-1, 2), st.floats(-1, 2))
def test_theorem_xgrpo_variance_identity_and_its_sign(
    zs: list[list[float]], r: list[float], b_n: float, b_pool: float
) -> None:
    rewards, left, right, change = np.array(r), 0.0, 0.0, 0.0
    for z in zs:  # two prompts
        pi = softmax(z)
        norms = (scores(pi) ** 2).sum(axis=1)
        h = float((pi * norms).sum())
        best = float((pi * rewards * norms).sum()) / h
        d, delta = b_n - best, b_n - b_pool
        difference = second_moment(b_pool, rewards, pi) - second_moment(b_n, rewards, pi)  # |g|^2 cancels
        assert difference == pytest.approx(h * (delta**2 - 2 * d * delta), abs=1e-9)
        left, right, change = left + h * d * delta, right + h * delta**2 / 2, change + difference
    if abs(left - right) > 1e-9:
        assert (change < 0) == (left > right)


@given(st.permutations(["right", "also right", "wrong"]), st.sampled_from(["matched", "shuffled"]))
def test_theorem_xgrpo_has_no_direct_score_term(texts: list[str], pool: str) -> None:
    """Peer pools that differ only in texts, ids and traces give the same advantages and no rows."""
    own = [("p", 0.0), ("p", 1.0), ("q", 0.0), ("q", 0.0)]
    plans = [
        plan(
            view(
                own, {"bob": Peer([("p", 1.0, text, [1], [-1.0]), ("p", 0.0, "x"), ("q", 1.0, text), ("q", 0.0, "y")])}
            ),
            XGRPO(pool=pool),
        )
        for text in texts
    ]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].rows == ()


def gradient_of(plan: Plan, own_actions: Sequence[int], z: Sequence[float]) -> Vector:
    """Return the ascent direction of a plan on a softmax over z, from our losses: advantages on own actions, and NLL
    rows whose token ids are actions."""
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    logps = torch.log_softmax(logits, 0)
    loss = torch.zeros((), dtype=torch.float64)
    if plan.advantages is not None:
        own, advantages = logps[list(own_actions)][:, None], torch.tensor(plan.advantages, dtype=torch.float64)[:, None]
        loss = loss + band_loss(own, own.detach(), advantages, 0.2, 0.2).mean()
    for row in plan.rows:
        assert row.loss == "nll"
        nll = row_nll(logps[list(row.token_ids)][None], torch.ones((1, len(row.token_ids)), dtype=torch.bool))
        loss = loss + nll_loss(nll, weight=row.weight, count=len(plan.rows), ranks=1)
    loss.backward()
    assert logits.grad is not None
    return -logits.grad.numpy()


ACTIONS = {"a0": (0,), "a1": (1,), "a2": (2,)}


@given(logits)
def test_proposition_zero_support_boundary(z: list[float]) -> None:
    """The learner sampled only a0 and failed; a peer succeeded with a2. XGRPO lowers a0 and keeps the ratio of the
    others: nothing favours a2. SGT raises a2 above a1."""
    round_ = view(
        [("p", 0.0), ("p", 0.0)],
        {"bob": Peer([("p", 1.0, "a2"), ("p", 1.0, "a2")])},
        fit=lambda text, ended: ACTIONS.get(text),
    )
    by_value = gradient_of(plan(round_, XGRPO(mix=1)), [0, 0], z)
    score_of_a0 = scores(softmax(z))[0]
    scale = by_value[0] / score_of_a0[0]
    assert scale < 0
    assert by_value == pytest.approx(scale * score_of_a0, abs=1e-12)  # no term with another action's score
    by_outcome = gradient_of(plan(round_, SGT()), [0, 0], z)
    assert by_outcome == pytest.approx(0.1 * scores(softmax(z))[2], abs=1e-12)
    assert by_outcome[2] > 0 > by_outcome[1]


@pytest.mark.parametrize("regime", [SGT(), PRP(denominator="snapshot")])
def test_corollary_hard_support_boundary(regime: Regime) -> None:
    """A success that the learner's vocabulary cannot encode gives no row under any regime, and the same XGRPO
    advantages as an encodable one: only rewards move the learner's own actions."""
    plans, advantages = [], []
    for ids in ((2,), None):
        round_ = view(
            [("p", 0.0), ("p", 0.0)],
            {"bob": Peer([("p", 1.0, "a2"), ("p", 0.0, "a2")])},
            fit=lambda text, ended, ids=ids: ids,
        )
        plans.append(plan(round_, regime))
        advantages.append(plan(round_, XGRPO(mix=1)).advantages)
    reachable, unreachable = plans
    assert len(reachable.rows) > 0
    assert unreachable.rows == ()
    assert unreachable.advantages is None  # as GRPO without peers: the pool is empty
    assert advantages[0] == advantages[1]
    assert advantages[0] is not None and all(a < 0 for a in advantages[0])


@settings(max_examples=25)
@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=2), st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=4)
)
def test_corollary_hard_support_probability_of_an_own_success(z: list[float], peer_rewards: list[float]) -> None:
    """Of three actions the learner cannot take a2. Whatever the pool, P(a success in its group) is 1 - (1 - p)^K, and
    an XGRPO step leaves the probability of a2 at exactly 0."""
    size, rewards = 3, np.array([0.0, 1.0, 1.0])
    supported = softmax(z)
    pi = np.array([*supported, 0.0])
    before, step = 0.0, np.zeros(2)
    for probability, own in groups_of(pi, size):
        before += probability * bool(rewards[list(own)].any())
        if probability > 0:
            step += probability * xgrpo_gradient(own, peer_rewards, rewards, pi)[:2]
    p = float(pi @ rewards)
    assert before == pytest.approx(1 - (1 - p) ** size)
    after = np.array([*softmax((np.array(z) + step).tolist()), 0.0])
    assert after[2] == 0.0
    only_a2 = np.array([0.0, 0.0, 1.0])  # the peer's success alone
    assert sum(q * bool(only_a2[list(own)].any()) for q, own in groups_of(after, size)) == 0.0


@pytest.mark.parametrize(("p", "peers", "k"), [(0.1, (0.3,), 4), (0.4, (0.2, 0.1), 2), (0.05, (0.5, 0.5, 0.9), 5)])
def test_definition_and_lemma_gate_probability_and_its_derivative_by_simulation(
    p: float, peers: tuple[float, ...], k: int
) -> None:
    rng, rounds, defaults = np.random.default_rng(7), 40_000, SGT()
    uniforms = rng.random((rounds, k))
    peer_rewards = np.concatenate([(rng.random((rounds, k)) < q) for q in peers], axis=1).astype(float)

    def rate(own: float) -> float:
        return float(
            np.mean(
                [
                    gate((u < own).astype(float).tolist(), r.tolist(), defaults)
                    for u, r in zip(uniforms, peer_rewards, strict=True)
                ]
            )
        )

    reached = 1 - math.prod((1 - q) ** k for q in peers)
    probability = (1 - p) ** k * reached
    assert rate(p) == pytest.approx(probability, abs=4.5 * math.sqrt(probability / rounds))
    step = 0.04
    slope = (rate(p + step) - rate(p - step)) / (2 * step)
    exact = -k * (1 - p) ** (k - 1) * reached
    assert slope < 0
    assert slope == pytest.approx(exact, rel=0.1)


def one_pair_loss(z: torch.Tensor, action: int, weight: float) -> torch.Tensor:
    """Return our SGT loss for one pair of one token."""
    return nll_loss(
        row_nll(torch.log_softmax(z, 0)[action].reshape(1, 1), torch.ones((1, 1), dtype=torch.bool)),
        weight=weight,
        count=1,
        ranks=1,
    )


@given(logits, st.integers(0, 2))
def test_theorem_sgt_rescue_step_raises_the_log_prob_to_first_order(values_: list[float], action: int) -> None:
    z = torch.tensor(values_, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(one_pair_loss(z, action, weight=0.1), z)
    score = scores(softmax(values_))[action]
    gain = 0.1 * float(score @ score)

    def after(eta: float) -> float:
        with torch.no_grad():
            moved = torch.log_softmax(z - eta * gradient, 0)[action] - torch.log_softmax(z, 0)[action]
        return float(moved)

    errors = [abs(after(eta) - eta * gain) for eta in (1e-2, 1e-3)]
    assert errors[0] <= 1e-2**2
    assert errors[1] <= errors[0] / 50 + 1e-12  # the remainder is of second order


@given(logits, logits)
def test_theorem_sgt_lowers_the_divergence_from_the_peers_successes(values_: list[float], peer: list[float]) -> None:
    tau = softmax(peer)
    z = torch.tensor(values_, dtype=torch.float64, requires_grad=True)
    loss = torch.stack([tau[a] * one_pair_loss(z, a, weight=1.0) for a in range(3)]).sum()
    (gradient,) = torch.autograd.grad(loss, z)

    def divergence(at: torch.Tensor) -> float:
        return float((torch.tensor(tau) * (torch.tensor(np.log(tau)) - torch.log_softmax(at, 0))).sum())

    size = float(gradient @ gradient)
    change = divergence(z.detach() - 1e-3 * gradient) - divergence(z.detach())
    assert change == pytest.approx(-1e-3 * size, abs=1e-6 * max(size, 1e-9) + 1e-14)


def added_gradient(gated: Sequence[bool], z: torch.Tensor, normalize: str, weight: float) -> torch.Tensor:
    """Return SGT's addition to the gradient of a step with len(gated) prompts."""
    indices = [i for i, open_ in enumerate(gated) if open_]
    if not indices:
        return torch.zeros_like(z)
    nll = torch.cat(
        [row_nll(torch.log_softmax(z[i], 0)[:1, None], torch.ones((1, 1), dtype=torch.bool)) for i in indices]
    )
    loss = nll_loss(nll, weight=weight, count=len(indices) if normalize == "pairs" else len(gated), ranks=1)
    (gradient,) = torch.autograd.grad(loss, z)
    return gradient


def perturbation(gated: Sequence[bool], z: torch.Tensor, normalize: str, weight: float) -> float:
    """Return the norm of SGT's addition to the gradient of a step with len(gated) prompts."""
    return float(added_gradient(gated, z, normalize, weight).norm())


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_proposition_expected_perturbation_is_bounded_by_the_rescue_rate(rate: float) -> None:
    rng, prompts, weight = np.random.default_rng(3), 20, 0.1
    z = torch.tensor(rng.normal(size=(prompts, 3)), requires_grad=True)
    largest = max(float(np.linalg.norm(scores(softmax(row.tolist()))[0])) for row in z.detach())
    rounds = [rng.random(prompts) < rate for _ in range(2000)]
    mean_rate = float(np.mean(rounds))
    result = np.array([perturbation(r.tolist(), z, "prompts", weight) for r in rounds])
    assert result.mean() <= weight * largest * mean_rate
    assert (result**2).mean() <= weight**2 * largest**2 * mean_rate


def expected_divergence(z: torch.Tensor, normalize: str, rate: float, eta: float) -> tuple[float, float]:
    """Return the mean of KL(pi_base || pi_comb), summed over the prompts, and the proposition's bound on it without
    its third-order term. Both policies follow the same base step; kappa is the largest eigenvalue of the softmax's
    Fisher matrix along it."""
    rng, weight = np.random.default_rng(5), 0.1
    base = (z + eta * torch.tensor(rng.normal(size=tuple(z.shape)))).detach()
    probabilities = torch.softmax(base, 1)
    fisher = torch.diag_embed(probabilities) - probabilities[:, :, None] * probabilities[:, None, :]
    kappa = float(torch.linalg.eigvalsh(fisher).max())
    largest = max(float(np.linalg.norm(scores(softmax(row.tolist()))[0])) for row in z.detach())
    rounds = [(rng.random(len(z)) < rate).tolist() for _ in range(1000)]
    divergences = []
    for gated in rounds:
        combined = base - eta * added_gradient(gated, z, normalize, weight)
        log_ratio = torch.log_softmax(base, 1) - torch.log_softmax(combined, 1)
        divergences.append(float((probabilities * log_ratio).sum()))
    return float(np.mean(divergences)), kappa / 2 * eta**2 * weight**2 * largest**2 * float(np.mean(rounds))


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_proposition_expected_divergence_is_bounded_by_the_rescue_rate(rate: float) -> None:
    z = torch.tensor(np.random.default_rng(3).normal(size=(20, 3)), requires_grad=True)
    for eta in (0.1, 0.01):
        divergence, bound = expected_divergence(z, "prompts", rate, eta)
        assert 0 < divergence <= bound * (1 + eta)  # the remainder is of order eta^3


def test_divergence_normalized_by_pairs_exceeds_the_bound_at_a_low_rescue_rate() -> None:
    """The default normalisation is a mean over the pairs of a step: one pair alone has the whole weight."""
    z = torch.tensor(np.random.default_rng(3).normal(size=(20, 3)), requires_grad=True)
    divergence, bound = expected_divergence(z, "pairs", 0.02, 0.01)
    assert divergence > 2 * bound


def test_perturbation_normalized_by_pairs_does_not_shrink_with_the_rescue_rate() -> None:
    z = torch.zeros((20, 3), dtype=torch.float64, requires_grad=True)
    one, half = ([i < n for i in range(20)] for n in (1, 10))
    norm: Callable[[Sequence[bool], str], float] = lambda gated, how: perturbation(gated, z, how, 0.1)  # noqa: E731
    assert norm(one, "pairs") > norm(half, "pairs")
    assert norm(one, "prompts") < norm(half, "prompts")
