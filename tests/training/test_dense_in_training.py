"""`dense` in real trainings: one step by hand, GRPO's bytes without a coefficient, 0 from a teacher that is the learner."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import Cli
from mutualrl.adapter.trl_compat import add_token_advantages
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import FencedError
from mutualrl.records import Rollout, Score
from mutualrl.see import Exchange
from mutualrl.tasks.boxed import boxed_score
from mutualrl.thl import retokenize
from mutualrl.thl.offsets import token_offsets
from mutualrl.traits import SourceTraits
from mutualrl.trajectory import Trajectory
from training_harness import BY_ID, ReplayedMutual, gold, rollout_text, sampled_rounds, sharing, train

pytestmark = pytest.mark.slow
LEARNING_RATE = 0.05


def scored_round(root: Path, tokenizer: Any, solved: set[str]) -> dict[tuple[str, int], np.ndarray]:
    """Publish round 0 of a source that solves some prompts and reads the learner's texts with its own tokens; return
    its log-probs by prompt and rollout."""
    exchange, random = Exchange(root, "t", "script"), np.random.default_rng(0)
    answers, scores, logprobs = [], [], {}
    for prompt_id in dict.fromkeys(sampled_rounds(8, 1)[0]):
        text, is_solved = gold(BY_ID[prompt_id]), prompt_id in solved
        answers.append(Rollout(prompt_id, 0, float(is_solved), True, trajectory=Trajectory.of_text(text)))
        for number in range(4):
            written = rollout_text(BY_ID[prompt_id], number, "own")
            ids = retokenize(written, tokenizer, ended=True).ids
            ends = np.append(token_offsets(ids[:-1], tokenizer, written)[:, 1], len(written.encode()))
            logprobs[prompt_id, number] = random.normal(-2, 1.5, size=len(ids)).astype(np.float32)
            scores.append(Score("ada", prompt_id, number, ends.astype(np.int32), logprobs[prompt_id, number]))
    parts = [exchange.write_part(0, answers), exchange.write_scores(0, scores)]
    exchange.commit(0, parts, 0)
    with pytest.raises(FencedError):  # one attempt publishes one content
        exchange.commit(0, [parts[0], exchange.write_scores(0, scores[1:])], 0)
    return logprobs


def dead_prompts() -> set[str]:
    """Return the prompts of round 0 that all four of the learner's recorded rollouts fail."""
    return {
        prompt_id
        for prompt_id in sampled_rounds(8, 1)[0]
        if not any(boxed_score(rollout_text(BY_ID[prompt_id], n, "own"), BY_ID[prompt_id].answer) for n in range(4))
    }


class Watched(ReplayedMutual):
    """Keeps what the loss is given."""

    def on_generated(self, batch: Any, generation: Any) -> None:
        super().on_generated(batch, generation)
        self.given = {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}
        self.prompts_of_rows = [row["prompt_id"] for row in generation.inputs]


def test_one_step_by_hand(tiny: dict[str, Path], tmp_path: Path) -> None:
    """One SGD step of TRL's loss on advantages per token, against the loss written out; only dead prompts that the
    source solves have any, and these are coef * clip(log T - log S)."""
    tokenizer, dead = load_tokenizer(str(tiny["ada"])), dead_prompts()
    taught = set(sorted(dead)[:-1])  # one dead prompt is beyond the source
    assert len(taught) >= 1
    theirs = scored_round(tmp_path / "x", tokenizer, taught | {sampled_rounds(8, 1)[0][0]})
    taught = {prompt_id for prompt_id in taught | {sampled_rounds(8, 1)[0][0]} if prompt_id in dead}
    shared = replace(
        sharing(tmp_path / "x", "dense", peers=("t",), coef=0.5, clip=1.5), asked={"t": SourceTraits(True, True)}
    )
    keys = {"max_steps": 1, "beta": 0.0, "learning_rate": LEARNING_RATE, "optim": "sgd", "max_grad_norm": 0.0}
    trainer = train(Watched, tiny["ada"], tmp_path / "o", shared, lr_scheduler_type="constant", **keys)
    batch = trainer.given
    model = AutoModelForCausalLM.from_pretrained(tiny["ada"], dtype=torch.float32)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
    logps = torch.log_softmax(logits, dim=-1).gather(-1, batch["completion_ids"][..., None]).squeeze(-1)
    expected = torch.zeros_like(logps)
    for row, prompt_id in enumerate(trainer.prompts_of_rows):
        if prompt_id in taught:
            other = torch.from_numpy(theirs[prompt_id, row % 4])
            ratio = other - logps[row, : len(other)].detach()
            expected[row, : len(other)] = 0.5 * ratio.clamp(-1.5, 1.5)
    plain = batch["advantages"] - expected
    assert plain.std(dim=1).max() < 1e-5  # what is left is one number per rollout: GRPO's
    rewards = torch.tensor(
        [
            boxed_score(rollout_text(BY_ID[p], row % 4, "own"), BY_ID[p].answer)
            for row, p in enumerate(trainer.prompts_of_rows)
        ]
    ).reshape(-1, 4)
    grpo = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)
    assert plain[:, 0] == pytest.approx(grpo, abs=1e-5)
    per_token = -(expected + grpo[:, None]) * torch.exp(logps - logps.detach())
    in_loss = batch["completion_mask"]
    loss = ((per_token * in_loss).sum(1) / in_loss.sum(1)).mean()
    loss.backward()
    trained = trainer.model.state_dict()
    moved = 0.0
    for name, weight in model.named_parameters():
        after = weight.detach() - LEARNING_RATE * weight.grad
        moved = max(moved, float((weight.grad).abs().max()))
        assert torch.allclose(trained[name], after, atol=1e-6), name
    assert moved > 1e-3
    (row,) = trainer.kept
    assert row["dense/gate_rate"] == len(taught) / 8
    assert row["dense/rollouts"] == 4 * len(taught)
    assert row["dense/clipped"] > 0


def test_tokens_are_added_to_the_rows_of_each_rank() -> None:
    """Two ranks with two rows each give what one with four rows has."""
    by_row = {1: np.array([1, 2], dtype=np.float32), 2: np.array([3, 4, 5], dtype=np.float32)}
    advantages = torch.tensor([0.5, 0.0, 0.0, -1.0])
    whole = {"advantages": advantages.clone(), "completion_ids": torch.zeros((4, 3), dtype=torch.long)}
    add_token_advantages(SimpleNamespace(accelerator=SimpleNamespace(process_index=0)), whole, by_row)
    assert whole["advantages"].tolist() == [[0.5] * 3, [1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [-1.0] * 3]
    for rank in (0, 1):
        part = {"advantages": advantages[2 * rank :][:2], "completion_ids": torch.zeros((2, 3), dtype=torch.long)}
        add_token_advantages(SimpleNamespace(accelerator=SimpleNamespace(process_index=rank)), part, by_row)
        assert torch.equal(part["advantages"], whole["advantages"][2 * rank :][:2])


def metrics(run: Path, policy: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "policies" / policy / "metrics.jsonl").read_text().splitlines()]


SHORT = ("--set", "run.steps=3", "--set", "run.validate_every=3", "--set", "run.validation_limit=8")


@pytest.mark.extended
def test_without_a_coefficient_it_is_grpo_byte_for_byte(tmp_path: Path, cli: Cli) -> None:
    digests = []
    for name, arguments in {
        "grpo": ("--regime", "grpo"),
        "dense": ("--regime", "dense", "--source", "t=frozen:tiny:ada", "--set", "regime.coef=0"),
    }.items():
        result = cli("train", "--model", "tiny:bob", *arguments, *SHORT, "--run-dir", tmp_path / name)
        assert result.returncode == 0, result.stderr
        model = tmp_path / name / "policies" / "bob" / "model" / "model.safetensors"
        digests.append(hashlib.sha256(model.read_bytes()).hexdigest())
    assert digests[0] == digests[1]
    assert sum(row["dense/rollouts"] for row in metrics(tmp_path / "dense", "bob")) > 0


@pytest.mark.extended
def test_a_teacher_that_is_the_learner_gives_zero_on_every_token(tmp_path: Path, cli: Cli) -> None:
    """A wrong template, shift, temperature or cache would show at once. The reward is a hash, so that a copy of the
    learner solves what the learner fails. A second learner with another vocabulary is far from 0."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import hashlib\n\ndef drawn(completions, **columns):\n"
        "    return [float(hashlib.sha256(text.encode()).digest()[0] % 3 == 0) for text in completions]\n"
    )
    settings = ("--set", f"task.reward={reward}:drawn", *SHORT, "--set", "trainer.learning_rate=0.0")
    for learner in ("ada", "bob"):
        arguments = ("--model", f"tiny:{learner}", "--source", "t=frozen:tiny:ada", "--regime", "dense", *settings)
        result = cli("train", *arguments, "--run-dir", tmp_path / learner)
        assert result.returncode == 0, result.stderr
        rows = metrics(tmp_path / learner, learner)
        assert sum(row["dense/tokens"] for row in rows) > 50
        largest = max(row.get("dense/largest", 0.0) for row in rows)
        assert largest <= 1e-5 if learner == "ada" else largest > 1
    verified = cli("runs", "verify", tmp_path / "ada")
    assert verified.returncode == 0, verified.stderr
    scores = tmp_path / "ada" / "exchange" / "t" / "000001.scores.parquet"
    scores.write_bytes(scores.read_bytes()[:-1])
    damaged = cli("runs", "verify", tmp_path / "ada")
    assert damaged.returncode != 0
    assert "000001.scores.parquet" in damaged.stdout + damaged.stderr


def test_a_source_that_cannot_score_is_refused(cli_here: Cli) -> None:
    for source in ("t=recorded:tiny:book", "t=served:http://127.0.0.1:9/v1"):
        result = cli_here("train", "--model", "tiny:ada", "--regime", "dense", "--source", source, "--dry-run")
        assert result.returncode == 2
        assert "needs a source that scores the learner's texts; expected a source frozen:MODEL" in result.stderr
    alone = cli_here("train", "--pool", "tiny", "--regime", "dense", "--dry-run")
    assert alone.returncode == 2, alone.stdout
    assert (
        "dense learns from a source's scores, and there is none for policy 'ada'; add one: --source NAME=frozen:MODEL"
        in (alone.stderr)
    )
