"""Sharing rules beyond the paper's, inside TRL's loop: whole steps against independent formulas, guided rollouts,
requirements of regimes, and resuming."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from independent import rivals
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import UsageError
from mutualrl.records import Rollout, row_id
from mutualrl.see import Exchange
from mutualrl.thl import retokenize
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.round_prompts import id_or_prompt
from mutualrl.trajectory import Trajectory
from training_harness import (
    BY_ID,
    PROMPTS,
    ReplayedMutual,
    boxed_reward,
    gold,
    publish_rollouts,
    rollout_text,
    same_training,
    sampled_rounds,
    sharing,
    train,
    trainer_keys,
)

pytestmark = pytest.mark.slow


class Gradients(TrainerCallback):
    """Callback that keeps the gradients of the first optimizer step."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.kept:
            self.kept = [p.grad.detach().clone() for p in model.parameters()]


class Watched(ReplayedMutual):
    """Trainer on recorded completions that keeps the first step's gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients = Gradients()
        self.add_callback(self.gradients)


def mean_logps(model: Any, tokenizer: Any, prompt_id: str, ids: list[int]) -> torch.Tensor:
    """Return the mean log-prob of a completion under a model, with its graph."""
    prompt = tokenizer(BY_ID[prompt_id].text)["input_ids"]
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None]).mean()


def expected_gradient(model: Path, rows: list[tuple[str, list[int], float]], count: int) -> list[torch.Tensor]:
    """Return the gradient of (1 / count) * sum of slope * mean log-prob, over (prompt, ids, slope)."""
    learner, tokenizer = AutoModelForCausalLM.from_pretrained(model), load_tokenizer(str(model))
    for prompt_id, ids, slope in rows:
        if slope:
            (slope / count * mean_logps(learner, tokenizer, prompt_id, ids)).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.parameters()]


def own_rows(tokenizer: Any, prompts: list[str]) -> list[tuple[str, list[int], float]]:
    """Return the learner's recorded rollouts: prompt, ids, reward."""
    rows = []
    for prompt_id in prompts:
        for number in range(4):
            text = rollout_text(BY_ID[prompt_id], number, "own")
            reward = boxed_reward([text], answer=[BY_ID[prompt_id].answer])[0]
            rows.append((prompt_id, list(retokenize(text, tokenizer, ended=True).ids), float(reward)))
    return rows


def publish_near(root: Path, tiny: dict[str, Path], prompts: list[str]) -> None:
    """Publish a round of bob with traces of ada's mean log-prob of its texts plus an offset: ratios of .95 and .74."""
    model, ada = AutoModelForCausalLM.from_pretrained(tiny["ada"]), load_tokenizer(str(tiny["ada"]))
    bob = load_tokenizer(str(tiny["bob"]))
    records = []
    for prompt_id in prompts:
        for number in range(4):
            text = rollout_text(BY_ID[prompt_id], number, "bob")
            ids = retokenize(text, bob, ended=True).ids
            with torch.no_grad():
                mean_logp = float(mean_logps(model, ada, prompt_id, list(retokenize(text, ada, ended=True).ids)))
            trace = (mean_logp + (0.05 if number % 2 else 0.3),) * len(ids)
            reward = float(boxed_reward([text], answer=[BY_ID[prompt_id].answer])[0])
            records.append(
                Rollout(
                    prompt_id,
                    number,
                    reward,
                    True,
                    trajectory=Trajectory.of_text(text),
                    token_ids=ids,
                    logprobs=trace,
                )
            )
    Exchange(root, "bob", "script").publish(0, records, 0)


@pytest.mark.parametrize("regime", ["hacpo", "swarm"])
def test_gradient_of_a_whole_step_matches_the_formulas(tiny: dict[str, Path], tmp_path: Path, regime: str) -> None:
    """For all parameters, to 1e-6; the reference uses the published rows, the formulas and autograd's mean log-prob of
    each row. The policy has not changed yet: own ratios are 1."""
    prompts = list(dict.fromkeys(sampled_rounds(8, 1)[0]))
    ada, bob = (load_tokenizer(str(tiny[name])) for name in ("ada", "bob"))
    publish_near(tmp_path / "x", tiny, prompts)
    settings: dict[str, Any] = {"external": 99} if regime == "swarm" else {}
    shared = sharing(tmp_path / "x", regime, tokenizers={"bob": bob}, **settings)
    keys = {"max_steps": 1, "beta": 0.0, "max_grad_norm": 1e9, **trainer_keys(regime)}
    learner = train(Watched, tiny["ada"], tmp_path / "a", shared, **keys)

    shard = Exchange(tmp_path / "x", "eve", "script").read("bob", 0)
    assert shard is not None
    traces = [None if trace is None else trace.tolist() for trace in shard.logprobs]
    peer = list(zip(shard.prompt_ids, shard.texts(), shard.rewards, traces, strict=True))
    peer_ids = [list(retokenize(text, ada, ended=True).ids) for _, text, _, _ in peer]
    own_rollouts = own_rows(ada, prompts)
    rows: list[tuple[str, list[int], float]] = []
    if regime == "hacpo":
        capabilities = {
            "ada": rivals.capability([sum(r > 0 for *_, r in own_rollouts) / len(own_rollouts)], 5),
            "bob": rivals.capability([sum(r > 0 for _, _, r, _ in peer) / len(peer)], 5),
        }
        weight = 1 / rivals.discrepancy(capabilities["ada"], capabilities["bob"])
        model = AutoModelForCausalLM.from_pretrained(tiny["ada"])
        unclipped = 0
        for prompt_id in prompts:
            own_group = [row for row in own_rollouts if row[0] == prompt_id]
            peer_rows = [index for index, row in enumerate(peer) if row[0] == prompt_id]
            groups = {"ada": [r for *_, r in own_group], "bob": [peer[index][2] for index in peer_rows]}
            advantages = rivals.hacpo_advantages(groups, "ada", capabilities, False)
            for (_, ids, _), advantage in zip(own_group, advantages["ada"], strict=True):
                rows.append((prompt_id, ids, -advantage))  # GSPO at ratio 1
            for index, advantage in zip(peer_rows, advantages["bob"], strict=True):
                with torch.no_grad():
                    logp = float(mean_logps(model, ada, prompt_id, peer_ids[index]))
                slope = rivals.hacpo_row_loss([logp], list(peer[index][3]), advantage, weight, 0)[1]
                unclipped += slope != 0
                rows.append((prompt_id, peer_ids[index], slope))
        assert 0 < unclipped < len(peer)  # the others are clipped
        count = len(rows)
    else:
        by_id = {p: [r for q, _, r in own_rollouts if q == p] for p in prompts}
        peers_by_id = {p: [row[2] for row in peer if row[0] == p] for p in prompts}
        own_advantages, peer_advantages = rivals.swarm_advantages(by_id, [peers_by_id[p] for p in prompts], "group")
        for p, peer_group_advantages in zip(prompts, peer_advantages, strict=True):
            own_ids = [ids for q, ids, _ in own_rollouts if q == p]
            rows += [(p, ids, -a) for ids, a in zip(own_ids, own_advantages[p], strict=False)]
            ids_of_peer = [peer_ids[index] for index, row in enumerate(peer) if row[0] == p]
            rows += [(p, ids, -a) for ids, a in zip(ids_of_peer, peer_group_advantages, strict=False)]
        count = len(rows)  # rows of the kept groups
        assert 0 < count < len(own_rollouts) + len(peer)
    expected = expected_gradient(tiny["ada"], rows, count)
    assert max(float(g.abs().max()) for g in expected) > 1e-3
    for one, other in zip(learner.gradients.kept, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6), float((one - other).abs().max())


def test_peer_groups_that_the_verifier_denies_are_left_out(tiny: dict[str, Path], tmp_path: Path) -> None:
    """bob claims successes that the learner's own verifier does not confirm."""
    exchange = Exchange(tmp_path / "x", "bob", "script")
    prompts = list(dict.fromkeys(sampled_rounds(8, 1)[0]))
    records = []
    for index, prompt_id in enumerate(prompts):
        solution = gold(BY_ID[prompt_id])
        claims = [(solution, 1.0), (" \\boxed{-1}", 1.0 if index < 3 else 0.0), (" \\boxed{-2}", 0.0)]
        records += [
            Rollout(prompt_id, i, reward, True, trajectory=Trajectory.of_text(text))
            for i, (text, reward) in enumerate(claims)
        ]
    exchange.publish(0, records, 0)
    shared = sharing(tmp_path / "x", "swarm", external=99)
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, max_steps=1)
    assert learner.kept[0]["swarm/denied"] == 3
    assert learner.kept[0]["swarm/external"] == 5
    assert learner.kept[0]["plan/texts_scored"] == 24


def test_swarm_uses_groups_on_other_prompts_of_the_learners_data(tiny: dict[str, Path], tmp_path: Path) -> None:
    seen = set(sampled_rounds(8, 1)[0])
    others = [prompt.id for prompt in PROMPTS if prompt.id not in seen][:8]
    publish_rollouts(tmp_path / "x", load_tokenizer(str(tiny["bob"])), [others])
    shared = sharing(tmp_path / "x", "swarm", external=99)
    learner = train(ReplayedMutual, tiny["ada"], tmp_path / "a", shared, max_steps=1)
    assert learner.kept[0]["swarm/other_prompts"] == learner.kept[0]["swarm/external"] > 0
    assert learner.kept[0]["grad_norm"] > 0


def test_swarm_on_an_iterable_dataset_is_rejected(tiny: dict[str, Path], tmp_path: Path) -> None:
    from datasets import Dataset

    import training_harness

    data = Dataset.from_list(list(training_harness.as_dataset(PROMPTS, load_tokenizer(str(tiny["ada"])))))
    prompts = sampled_rounds(8, 1)[0]
    publish_rollouts(tmp_path / "x", load_tokenizer(str(tiny["bob"])), [prompts])
    trainer = ReplayedMutual(
        model=str(tiny["ada"]),
        reward_funcs=boxed_reward,
        processing_class=load_tokenizer(str(tiny["ada"])),
        args=training_harness.config(tmp_path / "a", max_steps=1),
        train_dataset=data.to_iterable_dataset(),
        sharing=sharing(tmp_path / "x", "swarm", verify=False),
    )
    with pytest.raises(UsageError, match="looks up rows of data by prompt id: found IterableDataset"):
        trainer.train()


# ---- guided rollouts

GUIDED: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 32}


def failing(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def guided_run(tiny: dict[str, Path], tmp_path: Path, name: str, rounds: int, **keys: Any) -> Any:
    """Train ada, which fails every prompt, with gold solutions of bob, over two epochs of 4 rounds."""
    settings = keys.pop("settings", {})
    exchange = Exchange(tmp_path / f"{name}-x", "bob", "script")
    for number, prompts in enumerate(sampled_rounds(8, rounds)):
        records = [
            Rollout(
                p,
                0,
                1.0,
                True,
                trajectory=Trajectory.of_text(f" the answer is {BY_ID[p].answer}, that is {gold(BY_ID[p])}"),
            )
            for p in dict.fromkeys(prompts)
        ]
        exchange.publish(number, records, number)
    shared = sharing(tmp_path / f"{name}-x", "guided", **settings)
    return train(
        MutualGRPOTrainer, tiny["ada"], tmp_path / name, shared, reward=failing, max_steps=rounds, **GUIDED, **keys
    )


def test_guided_with_share_0_equals_grpo_trainer_bit_for_bit(tiny: dict[str, Path], tmp_path: Path) -> None:
    plain = train(GRPOTrainer, tiny["ada"], tmp_path / "plain", reward=failing, max_steps=6, **GUIDED)
    same_training(plain, guided_run(tiny, tmp_path, "a", 6, settings={"share": 0.0}))


@pytest.mark.parametrize("temperature", [1.0, 1.3])
def test_prefix_is_masked_and_guided_rollouts_have_no_trace(
    tiny: dict[str, Path], tmp_path: Path, temperature: float
) -> None:
    """In the second epoch, half of the rollouts begin with a prefix of bob's text; it is not in the loss, and they are
    published without log-probs. Those of the other rollouts are the policy's."""
    batches: list[dict[str, Any]] = []
    prefixes: list[Any] = []

    class RecordingTrainer(MutualGRPOTrainer):
        def on_generated(self, batch: dict[str, Any], generation: Any) -> None:
            super().on_generated(batch, generation)
            batches.append({key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)})
            prefixes.append(self.prefixes)

    exchange = Exchange(tmp_path / "x", "bob", "script")
    for number, prompts in enumerate(sampled_rounds(8, 5)):
        texts = [f" the answer is {BY_ID[p].answer}, that is {gold(BY_ID[p])}" for p in dict.fromkeys(prompts)]
        records = [
            Rollout(p, 0, 1.0, True, trajectory=Trajectory.of_stored(t, None))
            for p, t in zip(dict.fromkeys(prompts), texts, strict=True)
        ]
        exchange.publish(number, records, number)
    shared = sharing(tmp_path / "x", "guided", publish="full", share=0.5)
    learner = train(
        RecordingTrainer,
        tiny["ada"],
        tmp_path / "a",
        shared,
        reward=failing,
        max_steps=5,
        temperature=temperature,
        **GUIDED,
    )
    assert prefixes[:4] == [None] * 4
    assert learner.kept[4]["guided/rollouts"] == 16
    batch, batch_prefixes = batches[4], prefixes[4]
    assert [bool(prefix) for prefix in batch_prefixes[:4]] == [False, False, True, True]
    for row, prefix in enumerate(batch_prefixes):
        n = len(prefix)
        assert batch["completion_ids"][row, :n].tolist() == list(prefix)
        assert batch["tool_mask"][row, :n].tolist() == [0] * n
        counted = batch["completion_mask"][row].bool()
        assert batch["tool_mask"][row][counted][n:].all()

    shard = Exchange(tmp_path / "x", "eve", "script").read("ada", 4)
    assert shard is not None
    # all rewards are equal, so no step has changed the initial weights
    model = AutoModelForCausalLM.from_pretrained(tiny["ada"])
    tokenizer = load_tokenizer(str(tiny["ada"]))
    for row, rollout in enumerate(shard):
        prompt_id, ids, trace = rollout.prompt_id, list(rollout.token_ids), rollout.logprobs  # type: ignore[arg-type]
        assert (trace is None) == bool(batch_prefixes[row])  # no policy sampled a guided rollout completely
        if trace is None:
            continue
        prompt = tokenizer(BY_ID[prompt_id].text)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / temperature
        logps = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert trace == pytest.approx(logps.tolist(), abs=1e-4)


def test_gradient_of_guided_rollouts_excludes_the_prefix(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Compare with autograd: the mean log-prob of the continuation, given prompt and prefix, times the advantage."""
    batches: list[Any] = []

    class RecordingTrainer(MutualGRPOTrainer):
        def on_generated(self, batch: dict[str, Any], generation: Any) -> None:
            super().on_generated(batch, generation)
            batches.append({key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)})

    prompts = list(dict.fromkeys(sampled_rounds(8, 1)[0]))
    exchange = Exchange(tmp_path / "x", "bob", "script")
    exchange.publish(0, [Rollout(p, 0, 0.0, True) for p in prompts], 0)
    shared = sharing(tmp_path / "x", "guided", share=0.5)
    hint = list(retokenize(" the answer is 7, that is", load_tokenizer(str(tiny["ada"]))).ids)
    shared.memory.state = {"hints": {p: [0, hint] for p in prompts}}
    gradients = Gradients()

    def length_reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 3) for text in completions]

    class WithGradients(RecordingTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(gradients)

    keys = {**GUIDED, "max_steps": 1, "beta": 0.0, "max_grad_norm": 1e9}
    train(WithGradients, tiny["ada"], tmp_path / "a", shared, reward=length_reward, **keys)
    (batch,) = batches
    model = AutoModelForCausalLM.from_pretrained(tiny["ada"])
    count = len(batch["advantages"])
    counted = batch["tool_mask"] * batch["completion_mask"]
    assert (counted.sum(1) < batch["completion_mask"].sum(1)).sum() == 16
    for row in range(count):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        ids = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        mask = batch["tool_mask"][row][batch["completion_mask"][row].bool()].bool()
        logits = model(torch.tensor([prompt + ids.tolist()])).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0][mask]
        (-batch["advantages"][row] / count * logps.mean()).backward()
    for one, parameter in zip(gradients.kept, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(one, parameter.grad, atol=1e-6)


def test_script_with_guided_rollouts_resumes_bit_for_bit(tiny: dict[str, Path], tmp_path: Path) -> None:
    keys = {"save_strategy": "steps", "save_steps": 5}
    unbroken = guided_run(tiny, tmp_path, "a", 7, **keys)
    assert unbroken.kept[6]["guided/rollouts"] > 0
    shared = sharing(tmp_path / "a-x", "guided")
    shared = replace(shared, resume=True)
    checkpoint = tmp_path / "a" / "checkpoint-5"
    resumed = train(
        MutualGRPOTrainer,
        tiny["ada"],
        tmp_path / "b",
        shared,
        reward=failing,
        resume=checkpoint,
        max_steps=7,
        **GUIDED,
        **keys,
    )
    for one, other in zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for key in ("guided/prefix_tokens", "completions/mean_length", "loss", "prompts/dead"):
        assert [row[key] for row in resumed.kept] == [row[key] for row in unbroken.kept][5:], key


def test_dead_and_revived_prompts_are_counted(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Rewards are 0 in the first epoch and 1 in the second."""
    calls: list[int] = []

    def late(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [float(len(calls) > 4)] * len(completions)

    learner = train(
        MutualGRPOTrainer, tiny["ada"], tmp_path / "a", sharing(tmp_path / "x", "grpo"), reward=late, max_steps=6
    )
    dead = [row["prompts/dead"] for row in learner.kept]
    assert dead == [8.0, 16.0, 24.0, 32.0, 24.0, 16.0]
    assert [row["prompts/revived"] for row in learner.kept] == [0.0, 0.0, 0.0, 0.0, 8.0, 8.0]
    assert not math.isnan(learner.kept[0]["loss"])


def test_a_prompt_is_its_row_and_equal_rows_are_one(tmp_path: Path) -> None:
    row = {"prompt": "2 + 2?", "answer": "4"}
    assert id_or_prompt(row) == id_or_prompt(dict(row)) == row_id(row)
    assert id_or_prompt(row) != id_or_prompt({**row, "answer": "four"})
    assert id_or_prompt({**row, "prompt_id": "mine"}) == "mine"
    with (tmp_path / "f").open("w") as file:  # a column without an id, in a run that shares nothing
        assert id_or_prompt({**row, "log": file}) == id_or_prompt({"prompt": row["prompt"]})
