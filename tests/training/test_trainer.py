from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import PlanMismatchError, UsageError
from mutualrl.see import Exchange
from mutualrl.thl import retokenize
from mutualrl.training import MutualGRPOTrainer
from training_harness import BY_ID, STEPS, gold, publish_peer, rounds_of, same_training, sharing, train

pytestmark = pytest.mark.slow

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"loss_type": "dapo"},
    {"loss_type": "dr_grpo", "beta": 0.0},
    {"num_iterations": 2},
    {"steps_per_generation": 2, "per_device_train_batch_size": 16},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16, "temperature": 1.4},
    {"scale_rewards": "batch", "gradient_checkpointing": True},
]


@pytest.mark.parametrize("keys", CONFIGURATIONS, ids=str)
def test_trainer_without_an_exchange_equals_grpo_trainer_bit_for_bit(
    tiny: dict[str, Path], tmp_path: Path, keys: dict[str, Any]
) -> None:
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a", **keys)
    same_training(plain, train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", **keys))
    assert any(row["grad_norm"] > 0 for row in plain.kept)


@pytest.mark.parametrize("publish", ["regime", "full"])
def test_regime_grpo_with_an_exchange_equals_grpo_trainer_bit_for_bit(
    tiny: dict[str, Path], tmp_path: Path, publish: str
) -> None:
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a")
    shared = sharing(tmp_path / "exchange", "grpo", publish=publish)
    same_training(plain, train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", shared))
    written = sorted(p.name for p in (tmp_path / "exchange" / "ada").glob("*.parquet"))
    assert written == ([] if publish == "regime" else [f"{i:06d}.parquet" for i in range(STEPS)])


def test_publish_full_writes_every_column(tiny: dict[str, Path], tmp_path: Path) -> None:
    rounds_of(tmp_path / "x", tiny["ada"], tmp_path / "a")
    shard = Exchange(tmp_path / "x", "eve", "script").read("ada", 0)
    assert shard is not None
    tokenizer = load_tokenizer(str(tiny["ada"]))
    assert len(shard) == 32
    rows = zip(
        *(shard.prompt_ids, shard.prompts, shard.texts(), shard.token_ids, shard.ended, shard.rewards, shard.indices),
        strict=True,
    )
    for prompt_id, x_text, y_text, ids, ended, reward, rollout in rows:
        assert x_text == BY_ID[prompt_id].text
        assert tokenizer.decode(ids, skip_special_tokens=True) == y_text
        assert ended == (ids[-1] == tokenizer.eos_token_id)
        assert reward in (0.0, 1.0)
        assert 0 <= rollout < 4
    assert sum(shard.advantages) == pytest.approx(0, abs=1e-4)
    by_hand = trace_by_hand(tiny["ada"], shard)
    for trace, expected in zip(shard.logprobs, by_hand, strict=True):
        assert trace == pytest.approx(expected, abs=1e-4)


def trace_by_hand(model_path: Path, shard: Any) -> list[list[float]]:
    """Return the log-probs of the sampled tokens under the model before training, one unpadded row at a time."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), load_tokenizer(str(model_path))
    rows = []
    for text, ids in zip(shard.prompts, shard.token_ids, strict=True):
        prompt = tokenizer(text)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].double()
        logps = torch.log_softmax(logits, dim=-1)
        rows.append([logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(ids)])
    return rows


def test_sgt_with_a_closed_gate_equals_grpo_trainer_bit_for_bit(tiny: dict[str, Path], tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path / "probe", tiny["ada"], tmp_path / "p")
    publish_peer(tmp_path / "x", rounds, solved=[])
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a")
    gated = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", sharing(tmp_path / "x", "sgt"))
    same_training(plain, gated)
    assert all(row["sgt/pairs"] == 0 and "sgt/nll" not in row for row in gated.kept)


def nll_by_hand(model_path: Path, pairs: list[tuple[str, str]]) -> float:
    """Return the mean over (prompt id, text) of the per-token mean NLL at temperature 1, one unpadded row at a time."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), load_tokenizer(str(model_path))
    values = []
    for prompt_id, text in pairs:
        prompt = tokenizer(BY_ID[prompt_id].text)["input_ids"]
        answer = list(retokenize(text, tokenizer, ended=True).ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double()
        logps = torch.log_softmax(logits, dim=-1)
        steps = [logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]
        values.append(-sum(steps) / len(steps))
    return sum(values) / len(values)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"temperature": 1.4},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 8},
        {"num_iterations": 2},
    ],
    ids=str,
)
def test_first_sgt_step_adds_weight_times_the_mean_nll(
    tiny: dict[str, Path], tmp_path: Path, keys: dict[str, Any]
) -> None:
    rounds = rounds_of(tmp_path / "probe", tiny["ada"], tmp_path / "p", **keys)
    publish_peer(tmp_path / "x", rounds)
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "a", **keys)
    shared = sharing(tmp_path / "x", "sgt", weight=0.25)
    learner = train(MutualGRPOTrainer, tiny["ada"], tmp_path / "b", shared, **keys)

    probe = Exchange(tmp_path / "probe", "eve", "script").read("ada", 0)
    assert probe is not None
    best: dict[str, float] = {}
    for prompt_id, reward in zip(probe.prompt_ids, probe.rewards, strict=True):
        best[prompt_id] = max(best.get(prompt_id, 0.0), reward)
    failed = [prompt_id for prompt_id, reward in best.items() if reward == 0.0]
    assert 0 < len(failed) < len(best)

    first = learner.kept[0]
    expected = nll_by_hand(tiny["ada"], [(p, gold(BY_ID[p])) for p in failed])
    assert first["sgt/pairs"] == len(failed)
    assert first["sgt/gate_rate"] == pytest.approx(len(failed) / len(best))
    assert first["sgt/nll"] == pytest.approx(expected, rel=1e-4)
    assert first["loss"] - plain.kept[0]["loss"] == pytest.approx(0.25 * expected, rel=1e-3)
    assert first["reward"] == plain.kept[0]["reward"]


def test_micro_batches_change_the_first_step_only_by_rounding(tiny: dict[str, Path], tmp_path: Path) -> None:
    rounds = rounds_of(tmp_path / "probe", tiny["ada"], tmp_path / "p", max_steps=1)
    publish_peer(tmp_path / "x", rounds)
    runs = [
        train(
            MutualGRPOTrainer,
            tiny["ada"],
            tmp_path / f"{n}",
            sharing(tmp_path / "x", "sgt"),
            max_steps=1,
            gradient_accumulation_steps=n,
            per_device_train_batch_size=32 // n,
        )
        for n in (1, 2, 4)
    ]
    for other in runs[1:]:
        for key in ("loss", "grad_norm", "sgt/nll"):
            assert other.kept[0][key] == pytest.approx(runs[0].kept[0][key], rel=1e-4), key


def test_pairs_lower_the_nll_of_their_texts(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Compare with a control whose pairs have weight 0: no threshold that depends on the machine."""
    rounds = rounds_of(tmp_path / "probe", tiny["ada"], tmp_path / "p", max_steps=8)
    pairs = [(prompt_id, gold(BY_ID[prompt_id])) for prompt_id in dict.fromkeys(itertools.chain(*rounds))]
    after = {}
    for weight in (0.0, 1.0):
        exchange = tmp_path / f"exchange-{weight:g}"
        publish_peer(exchange, rounds)
        shared = sharing(exchange, "sgt", weight=weight)
        learner = train(MutualGRPOTrainer, tiny["ada"], tmp_path / f"weight-{weight:g}", shared, max_steps=8)
        learner.model.save_pretrained(tmp_path / f"model-{weight:g}")
        load_tokenizer(str(tiny["ada"])).save_pretrained(tmp_path / f"model-{weight:g}")
        after[weight] = nll_by_hand(tmp_path / f"model-{weight:g}", pairs)
    before = nll_by_hand(tiny["ada"], pairs)
    assert before - after[1.0] > 2 * abs(before - after[0.0])


def test_use_cap_holds_over_the_run(tiny: dict[str, Path], tmp_path: Path) -> None:
    keys = {"max_steps": 8}  # 32 prompts, 8 per round: two epochs
    rounds = rounds_of(tmp_path / "probe", tiny["ada"], tmp_path / "p", **keys)
    publish_peer(tmp_path / "x", rounds)
    shared = sharing(tmp_path / "x", "sgt", max_uses_per_prompt=1)
    train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", shared, **keys)
    assert set(shared.memory.uses.values()) == {1}


def test_peers_with_other_prompts_are_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    publish_peer(tmp_path / "x", [list(BY_ID)[:8]] * STEPS)
    with pytest.raises(PlanMismatchError, match="'ada' and 'bob' did not see the same prompts"):
        train(MutualGRPOTrainer, tiny["ada"], tmp_path / "a", sharing(tmp_path / "x", "sgt"))


def test_rounds_that_straddle_optimizer_steps_are_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a multiple"):
        train(
            MutualGRPOTrainer,
            tiny["ada"],
            tmp_path / "a",
            sharing(tmp_path / "x", "sgt"),
            steps_per_generation=2,
            gradient_accumulation_steps=4,
            per_device_train_batch_size=16,
        )
