"""Each regime's loss and gradient inside TRL's loss, on a vocabulary of three tokens, against hand-computed numbers.

The policy is a softmax over three logits z = (ln 1, ln 2, ln 5) at every position: probabilities 1/8, 2/8, 5/8.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from trl import GRPOTrainer

from mutualrl.regimes import PPO, Band, Bound, ExtraRow, RowSource, Stepwise
from mutualrl.regimes.grpo_noise import GRPONoise
from mutualrl.regimes.losses import stepwise_loss
from mutualrl.regimes.xgrpo import XGRPO
from mutualrl.training.extra_rows import ExtraRows
from regime_views import Peer, view

Z = (0.0, math.log(2), math.log(5))
P = (1 / 8, 2 / 8, 5 / 8)


class Policy:
    """The parts of a GRPOTrainer that its loss reads; TRL's own `_compute_loss` on the softmax over `z`."""

    def __init__(self, z: torch.Tensor, rows: int, loss_type: str = "grpo") -> None:
        self.z, self.loss_type = z, loss_type
        self.args = SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=rows,
        )
        self.accelerator = SimpleNamespace(
            num_processes=1,
            process_index=0,
            device=torch.device("cpu"),
            distributed_type=DistributedType.NO,
            sync_gradients=True,
            gradient_state=SimpleNamespace(_set_sync_gradients=lambda value: None),
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
            no_sync=lambda model: nullcontext(),
            backward=lambda loss: loss.backward(),
        )
        self.model, self._tokenizer = SimpleNamespace(training=True), SimpleNamespace(pad_token_id=0)
        self.beta, self.epsilon_low, self.epsilon_high = 0.0, 0.2, 0.2
        self.top_entropy_quantile, self.off_policy_mask_threshold, self.importance_sampling_level = 1.0, None, "token"
        self.use_vllm = self._entropy_bonus_enabled = self.aux_loss_enabled = False
        self.current_gradient_accumulation_steps = self.num_iterations = 1
        self.max_completion_length, self._step, self.temperature = 4, 0, 1.0
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, keep: int, **_: Any) -> Any:
        logps = torch.log_softmax(self.z, 0)[ids[:, -keep:]]
        self.last_logps = logps.detach()
        return logps, torch.zeros_like(logps), None

    _compute_loss = GRPOTrainer._compute_loss


def own(ids: list[list[int]], advantages: list[float], old: list[list[float]] | None = None) -> dict[str, Any]:
    """Return the learner's own rows as TRL's inputs."""
    tokens = torch.tensor(ids)
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros((len(ids), 1), dtype=torch.long),
        "prompt_mask": torch.ones((len(ids), 1)),
        "completion_ids": tokens,
        "completion_mask": torch.ones_like(tokens),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(tokens.numel()),
    }
    return inputs if old is None else {**inputs, "old_per_token_logps": torch.tensor(old, dtype=torch.float64)}


def row(
    ids: tuple[int, ...], advantage: float, trace: list[float] | None, covered: list[bool] | None = None
) -> ExtraRow:
    return ExtraRow(
        "p",
        RowSource("bob", 0, 0),
        ids,
        "policy_gradient",
        advantage=advantage,
        mean="pool",
        logprobs=None if trace is None else np.array(trace, dtype=np.float32),
        mask=np.array(covered or [True] * len(ids)),
    )


DUAL_CLIP = PPO(4.0)


def pooled(
    rows: list[ExtraRow],
    inputs: dict[str, Any],
    z: tuple[float, ...] = Z,
    loss_type: str = "grpo",
    bound: Bound = DUAL_CLIP,
) -> tuple[float, list[float]]:
    """Return the value and the gradient of the pool's loss."""
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    trainer = Policy(logits, len(inputs["advantages"]), loss_type)
    peers = ExtraRows(trainer)
    peers.load([replace(row, bound=bound) for row in rows], {"p": (0,)}, inputs)
    loss = peers.loss(None, inputs, lambda rows: trainer._compute_loss(None, rows))
    loss.backward()
    assert logits.grad is not None
    return loss.item(), logits.grad.tolist()


def score(token: int) -> list[float]:
    return [float(j == token) - P[j] for j in range(3)]


def test_prp_by_hand() -> None:
    # Own row: token 2, A = 1, ratio 1. Peer's: token 1 with trace ln 1/4: ratio 1, A = -2; and token 0 with trace
    # ln 1/2: ratio 1/4, A = 3, below the band: PPO's minimum keeps it (A > 0). Three rows: the mean over them.
    rows = [row((1,), -2.0, [math.log(1 / 4)]), row((0,), 3.0, [math.log(1 / 2)])]
    value, gradient = pooled(rows, own([[2]], [1.0]))
    assert value == pytest.approx((-1 + 2 - 3 / 4) / 3)
    by_hand = [(-1 * score(2)[j] + 2 * score(1)[j] - 3 / 4 * score(0)[j]) / 3 for j in range(3)]
    assert gradient == pytest.approx(by_hand)


def test_prp_clips_both_ways_by_hand() -> None:
    # Ratios 5/4 and 10: with A > 0 the first is clipped to 1.2 and gives no gradient; with A < 0 the second is bounded
    # by delta = 4 and gives none. The own row's token 0, A = 1.
    rows = [row((2,), 1.0, [math.log(1 / 2)]), row((2,), -1.0, [math.log(1 / 16)])]
    value, gradient = pooled(rows, own([[0]], [1.0]))
    assert value == pytest.approx((-1 - 1.2 + 4) / 3)
    assert gradient == pytest.approx([-score(0)[j] / 3 for j in range(3)])


def test_prp_masks_uncovered_tokens_by_hand() -> None:
    # The peer's row: token 1 covered at ratio 1, token 2 not; A = 2. A mean over the row's one covered token.
    rows = [row((1, 2), 2.0, [math.log(1 / 4), 0.0], [True, False])]
    value, gradient = pooled(rows, own([[2]], [0.0]))
    assert value == pytest.approx(-2 / 2)
    assert gradient == pytest.approx([-2 * score(1)[j] / 2 for j in range(3)])


@pytest.mark.parametrize(("loss_type", "own_part", "peer_part"), [("dapo", 1 / 3, 1 / 3), ("dr_grpo", 1 / 8, 1 / 8)])
def test_prp_has_one_normaliser_for_all_rows_by_hand(loss_type: str, own_part: float, peer_part: float) -> None:
    # One own token and two of the peer's: dapo divides by the 3 tokens, dr_grpo by 2 rows x 4 tokens.
    value, gradient = pooled(
        [row((0, 1), -2.0, [math.log(1 / 8), math.log(1 / 4)])], own([[2]], [1.0]), loss_type=loss_type
    )
    assert value == pytest.approx(-own_part + 2 * 2 * peer_part)
    by_hand = [-own_part * score(2)[j] + 2 * peer_part * (score(0)[j] + score(1)[j]) for j in range(3)]
    assert gradient == pytest.approx(by_hand)


def test_prp_snapshot_and_band_by_hand() -> None:
    value, gradient = pooled([row((1,), -2.0, None)], own([[2]], [1.0]))
    assert value == pytest.approx((-1 + 2) / 2)
    assert gradient == pytest.approx([(-score(2)[j] + 2 * score(1)[j]) / 2 for j in range(3)])
    # band: ratio 2 is clipped to 1.2, detached; -1.2 * A * log pi
    value, gradient = pooled([row((1,), 3.0, [math.log(1 / 8)])], own([[2]], [0.0]), bound=Band())
    assert value == pytest.approx(1.2 * 3 * math.log(4) / 2)
    assert gradient == pytest.approx([-1.2 * 3 * score(1)[j] / 2 for j in range(3)])


def test_hacpo_rows_by_hand() -> None:
    # Token 1 (probability 1/4) twice from a source of geometric mean 1/3, so s = 3/4: clipped at 0.8, with no gradient.
    # From one of 2/7: s = 7/8, objective s * s * A, whose gradient by the mean log-prob is s * s * A.
    traces = [[math.log(1 / 3)] * 2, [math.log(2 / 7)] * 2]
    rows = [row((1, 1), 3.0, traces[0]), row((1, 1), -2.0, traces[1])]
    value, gradient = pooled(rows, own([[2]], [0.0]), bound=Stepwise())
    assert value == pytest.approx((-0.8 * 0.8 * 3 + 7 / 8 * 7 / 8 * 2) / 3)
    assert gradient == pytest.approx([7 / 8 * 7 / 8 * 2 * score(1)[j] / 3 for j in range(3)])
    # Above 1 it is also clipped, alpha 0 leaves s unchanged, and the log-ratio is bounded.
    value, gradient = pooled([row((2,), 1.0, [math.log(1 / 8)])], own([[2]], [0.0]), bound=Stepwise())
    assert value == pytest.approx(-1 / 2)
    assert gradient == pytest.approx([0.0] * 3)
    value, gradient = pooled([rows[1]], own([[2]], [0.0]), bound=Stepwise(alpha=0.0))
    assert value == pytest.approx(7 / 8 * 2 / 2)
    assert gradient == pytest.approx([7 / 8 * 2 * score(1)[j] / 2 for j in range(3)])
    value, gradient = pooled([rows[1]], own([[2]], [0.0]), bound=Stepwise(max_log_ratio=0.1))
    assert value == pytest.approx(math.exp(-0.2) * 2 / 2)
    assert gradient == pytest.approx([0.0] * 3)


@pytest.mark.parametrize(("step", "lowest"), [(0, 0.8), (2, 0.85), (100, 1.0)])
def test_hacpo_clipping_tightens_with_the_mini_batches_of_a_round(step: int, lowest: float) -> None:
    logps = torch.tensor([[math.log(0.5)]], requires_grad=True)
    loss = stepwise_loss(logps, torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1).bool(), Stepwise(alpha=0.0), step)
    assert loss.item() == pytest.approx(-lowest)


def test_nll_row_with_sum_reduction_by_hand() -> None:
    # Tokens 1 and 0: -ln 1/4 - ln 1/8 = 5 ln 2, times the weight; its gradient the sum of both scores.
    nll_row = replace(row((1, 0), 0.0, None), loss="nll", weight=0.1, mean="rows", reduce="sum")
    logits = torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    trainer = Policy(logits, 1)
    inputs = own([[2]], [0.0])
    rows = ExtraRows(trainer)
    rows.load([nll_row], {"p": (0,)}, inputs)
    loss = rows.loss(None, inputs, lambda batch: trainer._compute_loss(None, batch))
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * 5 * math.log(2))
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-0.1 * (score(1)[j] + score(0)[j]) for j in range(3)])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "luspo"])
def test_prp_gradient_is_the_finite_difference_of_its_loss(loss_type: str) -> None:
    rows = [row((1, 0), -2.0, [-1.1, -1.9]), row((2,), 0.7, [-0.9]), row((0, 2, 2), 1.3, [-2.0, -0.5, -0.6])]
    inputs = own([[2, 1], [0, 0]], [1.0, -0.5], [[-0.45, -1.4], [-2.1, -2.0]])
    _, gradient = pooled(rows, dict(inputs), loss_type=loss_type)
    for j in range(3):
        up, down = (
            pooled(rows, dict(inputs), tuple(v + s * 1e-5 * (i == j) for i, v in enumerate(Z)), loss_type)[0]
            for s in (1, -1)
        )
        assert gradient[j] == pytest.approx((up - down) / 2e-5, abs=1e-6)


@pytest.mark.parametrize("regime", ["xgrpo", "grpo-noise"])
def test_value_sharing_by_hand_and_by_finite_differences(regime: str) -> None:
    # Own rewards 1, 0 on tokens 2, 1; the peer's 1, 1: pool mean 3/4, standard deviation 1/2, so A = 1/4 and -3/4,
    # each over .5001.
    learner_view = view([("p", 1.0), ("p", 0.0)], {"bob": Peer([("p", 1.0), ("p", 1.0)])})
    if regime == "xgrpo":
        settings = XGRPO(mix=1.0, length_correction=0.0)
        advantages, expected = settings.plan(learner_view).advantages, [0.25 / 0.5001, -0.75 / 0.5001]
    else:
        advantages = GRPONoise(noise=0.1).plan(learner_view).advantages
        assert advantages is not None
        shift = 0.5 - advantages[0] * (math.sqrt(0.5) + 1e-4)
        expected = [(0.5 - shift) / (math.sqrt(0.5) + 1e-4), (-0.5 - shift) / (math.sqrt(0.5) + 1e-4)]
    assert advantages == pytest.approx(expected)
    assert advantages is not None

    def loss(z: tuple[float, ...]) -> torch.Tensor:
        logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
        policy = Policy(logits, 2)
        value = policy._compute_loss(None, own([[2], [1]], list(advantages), [[math.log(P[2])], [math.log(P[1])]]))
        if torch.is_grad_enabled():
            value.backward()
            assert logits.grad is not None
            return logits.grad
        return value

    gradient = loss(Z).tolist()
    by_hand = [-(expected[0] * score(2)[j] + expected[1] * score(1)[j]) / 2 for j in range(3)]
    assert gradient == pytest.approx(by_hand)
    with torch.no_grad():
        for j in range(3):
            up, down = (loss(tuple(v + s * 1e-5 * (i == j) for i, v in enumerate(Z))).item() for s in (1, -1))
            assert gradient[j] == pytest.approx((up - down) / 2e-5, abs=1e-6)
