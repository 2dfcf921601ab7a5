from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.errors import DataError
from mutualrl.regimes.losses import aggregate, band_loss, normalizer_factors
from mutualrl.regimes.prp import PRP, chi_square, effective_sample_size
from mutualrl.regimes.round import RowStatistics
from mutualrl.regimes.transfer import Aligned
from regime_views import Peer, answered, plan, requests, view

OWN = [("p", 1.0), ("p", 0.0), ("q", 0.0), ("q", 0.0)]
BOB = [
    ("p", 1.0, "ab", [97, 98], [-0.5, -1.0]),
    ("p", 0.0, "c", [99], [-0.1]),
    ("q", 1.0, "de", [100, 101], [-2.0, -0.2]),
    ("q", 0.0, "f", [102], [-0.3]),
]


def test_own_and_peer_rows_share_one_advantage_pool() -> None:
    got = plan(view(OWN, {"bob": Peer(BOB)}), PRP())
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # p: 1, 0, 1, 0; mean 1/2, sample standard deviation sqrt(1/3)
    low, high = -0.25 / 0.5001, 0.75 / 0.5001  # q: 0, 0, 1, 0; mean 1/4, standard deviation 1/2
    assert got.advantages == pytest.approx([half, -half, low, low])
    assert [row.advantage for row in got.rows] == pytest.approx([half, -half, high, low])
    assert [(row.prompt_id, row.source.policy, row.source.rollout, row.token_ids) for row in got.rows] == [
        ("p", "bob", 0, (97, 98)),
        ("p", "bob", 1, (99,)),
        ("q", "bob", 2, (100, 101)),
        ("q", "bob", 3, (102,)),
    ]
    assert got.rows[0].logprobs is not None
    assert got.rows[0].logprobs.tolist() == [-0.5, -1.0]
    assert sum(len(row.token_ids) for row in got.rows) == 6


def test_snapshot_denominator_needs_no_trace() -> None:
    got = plan(view(OWN, {"bob": Peer([row[:3] for row in BOB])}), PRP(denominator="snapshot"))
    assert [row.logprobs for row in got.rows] == [None] * 4
    with pytest.raises(DataError, match="'bob' published no token_ids and no logprobs of rollout 0 on 'p'"):
        plan(view(OWN, {"bob": Peer([row[:3] for row in BOB])}), PRP())


def test_unfit_and_non_finite_rows_leave_the_pool_and_are_counted() -> None:
    peer = Peer([*BOB[:3], ("q", 0.0, "f", [102], [math.nan])])
    fit = lambda text, ended: None if text == "ab" else tuple(text.encode())  # noqa: E731
    got = plan(view(OWN, {"bob": peer}, fit=fit), PRP())
    assert got.metrics["prp/unencodable"] == 2
    assert [row.source.rollout for row in got.rows] == [1, 2]
    assert got.advantages is not None
    assert sum(got.advantages[:2]) + got.rows[0].advantage == pytest.approx(0)  # p's pool without the dropped success


def test_snapshot_denominator_ignores_the_trace() -> None:
    peer = Peer([(*row[:4], [math.nan] * len(row[3])) for row in BOB])
    assert len(plan(view(OWN, {"bob": peer}), PRP(denominator="snapshot")).rows) == 4
    assert plan(view(OWN, {"bob": peer}), PRP()).metrics["prp/unencodable"] == 4


def test_truncated_rows_are_masked_if_the_trainer_masks_truncated_completions() -> None:
    peer = Peer([(*BOB[0], False), *BOB[1:]])
    for masked, tokens in ((True, 0), (False, 2)):
        rows = plan(view(OWN, {"bob": peer}, mask_truncated=masked), PRP()).rows
        assert [int(row.covered.sum()) for row in rows] == [tokens, 1, 2, 1]  # still in the pool


def test_plan_without_peers_is_empty() -> None:
    got = plan(view(OWN), PRP())
    assert got.advantages is None
    assert got.rows == ()


def test_uncovered_tokens_are_masked_and_counted() -> None:
    def half(trace: Any, ids: Any, anchor: str) -> Aligned:
        covered = np.arange(len(ids)) % 2 == 0
        uncovered = [value for value, is_covered in zip(trace.logprobs, covered, strict=True) if not is_covered]
        return Aligned(np.where(covered, trace.logprobs, 0.0), covered, sum(uncovered), len(uncovered), -0.25)

    got = plan(view(OWN, {"bob": Peer(BOB)}, align=half), PRP())
    assert got.rows[0].covered.tolist() == [True, False]
    assert got.metrics["prp/uncovered"] == pytest.approx(2 / 6)
    uncovered = [abs(sum(row[4][1::2])) for row in BOB]
    assert got.metrics["prp/delta_thl"] == pytest.approx(sum(uncovered) / len(BOB))
    assert got.metrics["prp/mismatched"] == pytest.approx(sum(len(row[4][1::2]) for row in BOB) / len(BOB))
    assert got.metrics["prp/clipped_mass"] == pytest.approx(0.25)
    assert "prp/delta_thl" not in plan(view(OWN, {"bob": Peer(BOB)}), PRP(denominator="snapshot")).metrics


def test_plan_does_not_depend_on_the_order_of_peers() -> None:
    eve = [(p, 1 - r, *rest) for p, r, *rest in BOB]
    plans = [
        plan(view(OWN, {name: Peer(BOB if name == "bob" else eve) for name in order}), PRP())
        for order in (("bob", "eve"), ("eve", "bob"))
    ]
    assert plans[0].advantages == plans[1].advantages
    for one, other in zip(plans[0].rows, plans[1].rows, strict=True):
        assert (one.prompt_id, one.source, one.advantage, one.token_ids) == (
            other.prompt_id,
            other.source,
            other.advantage,
            other.token_ids,
        )


def test_band_loss_and_gradient_match_hand_computed_values() -> None:
    # Probabilities 1/8, 2/8, 5/8; the peer's are 1/4 each. Ratios 1/2, 1, 5/2; eps .2 clips to .8, 1, 1.2.
    logits = torch.log(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)).requires_grad_()
    logps = torch.log_softmax(logits, dim=0)[None]
    behaviour = torch.full((1, 3), math.log(0.25), dtype=torch.float64)
    per_token = band_loss(logps, behaviour, torch.tensor([[2.0]]), 0.2, 0.2)
    assert per_token[0].tolist() == pytest.approx([1.6 * math.log(8), 2 * math.log(4), 2.4 * math.log(1.6)])
    per_token.sum().backward()
    # d(-w A log p_i)/dz_j = -w A (1[i = j] - p_j), summed over i with weights 1.6, 2, 2.4 (sum 6)
    by_hand = [6 * 1 / 8 - 1.6, 6 * 2 / 8 - 2.0, 6 * 5 / 8 - 2.4]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(by_hand)


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.floats(-2, 2))
def test_band_gradient_matches_finite_differences_with_frozen_weights(values: list[float], advantage: float) -> None:
    behaviour = torch.tensor([[-0.3, -1.2, -2.5]], dtype=torch.float64)
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    weight = (torch.log_softmax(logits, 0).detach()[None] - behaviour).exp().clamp(0.8, 1.2)
    band_loss(torch.log_softmax(logits, 0)[None], behaviour, torch.tensor([[advantage]]), 0.2, 0.2).sum().backward()
    assert logits.grad is not None
    for j in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[j] = 1e-6
        up, down = (
            -(weight * advantage * torch.log_softmax(logits.detach() + s * step, 0)).sum().item() for s in (1, -1)
        )
        assert logits.grad[j].item() == pytest.approx((up - down) / 2e-6, abs=1e-6)


MASK = torch.tensor([[True, True, True], [True, False, False]])
VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, math.nan, math.inf]])


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", (2 + 10) / 2 / 4),
        ("sapo", (2 + 10) / 2 / 4),
        ("luspo", (6 + 10) / 2 / 4),
        ("dr_grpo", 16 / (2 * 20) / 4),
        ("bnpo", 16 / 4 / 4),
        ("dapo", 16 / 32),
        ("cispo", 16 / 32),
    ],
)
def test_mean_of_each_loss_type_matches_hand_computed_values(loss_type: str, expected: float) -> None:
    got = aggregate(VALUES, MASK, loss_type, accumulation=4, max_length=20, step_items=32)
    assert got.item() == pytest.approx(expected)  # masked values may be anything


def test_unknown_loss_type_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown loss type 'other'"):
        aggregate(VALUES, MASK, "other", accumulation=1, max_length=1, step_items=1)


@given(
    st.sampled_from(["grpo", "dr_grpo", "luspo"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 17),
    st.randoms(use_true_random=False),
)
def test_losses_of_ranks_micro_batches_and_chunks_sum_to_the_pool_mean(
    loss_type: str, ranks: int, micro: int, size: int, peers: int, random: Any
) -> None:
    """Use one-token rows, so that the pool's loss is the plain mean over all rows of the step."""
    from mutualrl.regimes.microbatches import assign_to_microbatches

    own = [random.uniform(-1, 1) for _ in range(ranks * micro * size)]
    peer_values = [random.uniform(-1, 1) for _ in range(peers)]
    rules = {"accumulation": micro, "max_length": 1, "step_items": 0.0}

    def mean(values: list[float], factor: float) -> float:
        tensor = torch.tensor(values, dtype=torch.float64)[:, None] * factor
        return aggregate(tensor, torch.ones_like(tensor, dtype=torch.bool), loss_type, **rules).item()

    total = 0.0
    counts = {"own": len(own), "extra": peers, "micro_batches": micro, "ranks": ranks}
    for number, slot in enumerate(assign_to_microbatches(peers, steps=1, micro_batches=micro, ranks=ranks).values()):
        total += mean(own[number * size : (number + 1) * size], normalizer_factors(loss_type, **counts).own) / ranks
        for start in range(0, len(slot), size):
            chunk = [peer_values[i] for i in slot[start : start + size]]
            total += mean(chunk, normalizer_factors(loss_type, **counts, chunk=len(chunk)).extra) / ranks
    assert total == pytest.approx((sum(own) + sum(peer_values)) / (len(own) + peers))


@pytest.mark.parametrize("wrong", [{"delta": 1.0}, {"clip": "x"}, {"denominator": "x"}, {"anchor": "x"}])
def test_out_of_range_settings_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PRP(**wrong)


def test_trust_band_admits_only_rows_with_ratio_in_the_clip_range() -> None:
    settings = PRP(trust="band")
    round_view = view(OWN, {"bob": Peer(BOB)}, clip=(0.2, 0.3))
    made = requests(round_view, settings)
    assert [ids for _, ids in made.logprobs] == [(97, 98), (99,), (100, 101), (102,)]
    # mean log-ratios: 0.25, ln 1.31, -0.22, -0.3: the ratios 1.284, 1.31, 0.803, 0.741
    answers = (np.array([0.0, -1.0]), np.array([-0.1 + math.log(1.31)]), np.array([-2.2, -0.44]), np.array([-0.6]))
    got = plan(answered(round_view, settings, logprobs=answers), settings)
    assert [row.token_ids for row in got.rows] == [(97, 98), (100, 101)]
    assert (got.metrics["prp/untrusted"], got.metrics["prp/rows"]) == (2.0, 2.0)
    pool = [1.0, 0.0, 1.0]  # of p; rejected rows are not in the baseline either
    assert got.advantages is not None
    assert got.advantages[0] == pytest.approx((1 - 2 / 3) / (np.std(pool, ddof=1) + 1e-4))
    assert requests(round_view, PRP()).passages == 0


def test_effective_sample_size_and_chi_square_match_hand_computed_values() -> None:
    ratios = np.array([1.0, 2.0, 0.0, 1.0])  # sum 4, sum of squares 6
    assert effective_sample_size(ratios) == pytest.approx(16 / (4 * 6))
    assert effective_sample_size(np.ones(5)) == 1.0
    # two responses with ratios 1 * 2 = 2 and 1/2 * 1/2 = 1/4: mean of 4 and 1/16, minus 1
    assert chi_square(np.log([2.0, 0.25])) == pytest.approx((4 + 1 / 16) / 2 - 1)
    assert chi_square(np.zeros(5)) == pytest.approx(0.0, abs=1e-15)
    assert chi_square(np.array([-800.0, 0.0])) == pytest.approx(-0.5)
    assert chi_square(np.array([400.0])) == np.inf
    both = {"bob": ratios, "cyd": np.ones(2)}
    responses = {"bob": np.log([2.0, 0.25]), "cyd": np.zeros(1)}
    got = PRP().row_metrics(RowStatistics(None, np.concatenate(list(both.values())), 0.8, 1.2, both, responses))
    assert (got["prp/ess"], got["prp/ess/bob"]) == (pytest.approx(16 / 24), pytest.approx(16 / 24))
    assert (got["prp/token_chi_square"], got["prp/token_chi_square/bob"]) == (pytest.approx(0.5), pytest.approx(0.5))
    assert got["prp/response_chi_square"] == got["prp/response_chi_square/bob"] == pytest.approx(1.03125)
    cyd = [got[f"prp/{name}/cyd"] for name in ("ess", "token_chi_square", "response_chi_square")]
    assert cyd == pytest.approx([1.0, 0.0, 0.0])


def test_trust_band_keeps_truncated_rows_in_the_pool() -> None:
    peer = Peer([("p", 1.0, "ab", [97, 98], [-0.5, -1.0], False), ("p", 0.0, "c", [99], [-0.1], True)])
    round_view = view(OWN, {"bob": peer}, mask_truncated=True)
    answers = (np.array([-0.5, -1.0]), np.array([-0.1]))
    got = plan(answered(round_view, PRP(trust="band"), logprobs=answers), PRP(trust="band"))
    assert (got.metrics["prp/rows"], got.metrics["prp/untrusted"]) == (2.0, 0.0)
