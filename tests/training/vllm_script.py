"""Run by test_vllm.py in its own process: one policy whose trainer samples with vLLM. Writes measurements.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import set_seed

from mutualrl.adapter.data import as_dataset
from mutualrl.engines import Sampling
from mutualrl.engines.scoring import completion_logprobs
from mutualrl.engines.transformers_engine import TransformersEngine, load_tokenizer
from mutualrl.see import Exchange
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.training import MutualGRPOTrainer
from mutualrl.training.vllm_generation import greedy, prepare_vllm, shut_down
from training_harness import PROMPTS, Logs, config, sharing

model, root = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
settings = {"use_vllm": True, "vllm_mode": "colocate"}
prepare_vllm(settings, cpu=True)
tokenizer = load_tokenizer(model)
logs = Logs()
trainer = MutualGRPOTrainer(
    model=model,
    reward_funcs=boxed_reward,
    processing_class=tokenizer,
    train_dataset=as_dataset(PROMPTS, tokenizer),
    args=config(root / "out", vllm_gpu_memory_utilization=0.1, vllm_max_model_length=128, max_steps=2, **settings),
    sharing=sharing(root / "x", "prp", peers=()),
    callbacks=[logs],
)
ids = prompt_ids([p.text for p in PROMPTS], tokenizer)


def sampled(seed: int) -> list[list[int]]:
    set_seed(seed)
    return [list(row) for row in trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=1)[1]]


def difference() -> float:
    """Return the mean |log-prob of vLLM's samples under vLLM - under the trainer's weights|, nats."""
    set_seed(3)
    _, completions, logprobs, _ = trainer.vllm_generation.generate(prompts=ids, images=None, num_generations=1)
    trainer_logprobs = completion_logprobs(trainer.accelerator.unwrap_model(trainer.model).eval(), ids, completions)
    vllm_logprobs = [[token[0] for token in row] for row in logprobs]
    return float(np.mean(np.abs(np.concatenate(trainer_logprobs) - np.concatenate(vllm_logprobs))))


def agreement() -> float:
    """Return the fraction of prompts whose greedy text from vLLM is that of transformers with the trainer's weights."""
    vllm_texts = [completion.text for completion in greedy(trainer, ids)]
    engine = TransformersEngine(trainer.accelerator.unwrap_model(trainer.model), tokenizer)
    expected = [group[0].text for group in engine.generate([p.text for p in PROMPTS], Sampling(max_new_tokens=20))]
    return sum(a == b for a, b in zip(vllm_texts, expected, strict=True)) / len(vllm_texts)


measurements: dict[str, object] = {"agreement_before": agreement()}
before = torch.get_rng_state()
first = [c.text for c in greedy(trainer, ids)]
measurements["rng_untouched"] = torch.equal(before, torch.get_rng_state())
measurements["same_seed"] = sampled(1) == sampled(1)
measurements["other_seed"] = sampled(1) != sampled(2)

set_seed(11)
trainer.train()
measurements["kept"] = logs.rows
measurements["agreement_after_training"] = agreement()
shard = Exchange(root / "x", "eve", "script").read("ada", 0)
assert shard is not None
measurements["traces"] = [len(t) == len(i) for t, i in zip(shard.logprobs, shard.token_ids, strict=True)]

measurements["difference_before"] = difference()
with torch.no_grad():  # very different weights: a stale engine would still answer as before
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.model.parameters():
        parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
measurements["difference_stale"] = difference()
trainer.state.global_step += 1  # as an optimizer step does
greedy(trainer, ids)
measurements["difference_in_step"] = difference()
(root / "measurements.json").write_text(json.dumps(measurements))
shut_down(trainer)
