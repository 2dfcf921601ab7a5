"""Rollouts that a regime requests: sampled by TRL now, with or without a hint, and judged on the prompt without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from mutualrl.engines.scoring import context_length
from mutualrl.regimes.hints import shown_hint, with_hint
from mutualrl.regimes.round import Sample, Sampled
from mutualrl.tasks.turns import NO_TURNS
from mutualrl.thl import decode_completion, ended
from mutualrl.training.tensors import as_batch, as_tensor, concatenated
from mutualrl.training.trl_compat import (
    Environments,
    HookedGRPOTrainer,
    Inputs,
    evaluating,
    of_rank,
    prompt_tokens,
    sampled_and_scored,
    token_logps,
    tokenizer_of,
    total_rewards,
)


def sampling_problems(trainer: HookedGRPOTrainer) -> list[str]:
    """Return why this trainer cannot answer a regime's requests for samples."""
    problems = []
    if trainer.tools or trainer.environment_factories is not None:
        problems.append(f"tools: the regime {NO_TURNS}")
    if not isinstance(trainer.train_dataset, Dataset):
        problems.append(
            f"train_dataset: found {type(trainer.train_dataset).__name__}, expected a datasets.Dataset: the regime "
            "requests samples on rows of it"
        )
    if trainer.use_vllm and trainer.vllm_mode == "server" and trainer.args.vllm_max_model_length is None:
        problems.append(
            "vllm_max_model_length: the regime requests samples, whose prompts may be long; expected the server's "
            "--max-model-len"
        )
    return problems


class _Row(NamedTuple):
    """A sample's data row, its prompt as it is shown, the token ids of that prompt, and those of the hint."""

    data: Inputs
    shown: Any
    prompt_ids: tuple[int, ...]
    hint_ids: tuple[int, ...]


def samples_of(
    trainer: HookedGRPOTrainer,
    samples: Sequence[Sample],
    data: Mapping[str, Inputs],
    environments: Environments,
) -> dict[Sample, Sampled | None]:
    """Return the rollout of every sample, identical on all ranks, which must all call this with the same samples.

    `data`: the data row of each prompt. Samples are distributed round-robin, and all ranks sample equally many rows in
    equally many batches: the first sample fills up a rank that has fewer. TRL samples as in training, one rollout per
    row, from the generators that checkpoints save; dropout is off. One whose prompt leaves less room than
    `max_completion_length` is not sampled: None. A hint is cut to that length, too, unless the sample says less.
    """
    room = longest_sequence(trainer) - trainer.max_completion_length
    distinct: dict[object, _Row] = {}
    rows = {}
    for sample in samples:
        key = sample.prompt_id, sample.hint, sample.template, sample.max_hint_tokens
        if key not in distinct:
            distinct[key] = _row(trainer, sample, data[sample.prompt_id])
        rows[sample] = distinct[key]
    fitting = [sample for sample in samples if len(rows[sample].prompt_ids) <= room]
    results: dict[Sample, Sampled | None] = dict.fromkeys(samples)
    if not fitting:
        return results
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    size = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    with evaluating(trainer.model), torch.no_grad():
        for start in range(0, len(fitting), size * ranks):
            trainer.model.eval()  # TRL's continuous batching leaves it in training mode
            block = fitting[start : start + size * ranks]
            own = block[rank::ranks]
            filled = [*own, *[fitting[0]] * (-(-len(block) // ranks) - len(own))]
            traced = any(sample.logprobs for sample in block)  # on all ranks: its passes may be collective
            drawn = _sampled(trainer, filled, [rows[sample] for sample in filled], environments, traced)[: len(own)]
            by_rank = [drawn] if ranks == 1 else gather_object([drawn])
            results |= {sample: by_rank[place % ranks][place // ranks] for place, sample in enumerate(block)}
    return results


def longest_sequence(trainer: HookedGRPOTrainer) -> int:
    """Return the maximum length of prompt and completion, in tokens, of the engine that samples."""
    length = context_length(trainer.model)
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        return min(length, int(trainer.vllm_generation.llm.llm_engine.model_config.max_model_len))
    return min(length, trainer.args.vllm_max_model_length or length) if trainer.use_vllm else length


def _row(trainer: HookedGRPOTrainer, sample: Sample, data: Inputs) -> _Row:
    longest = min(sample.max_hint_tokens or trainer.max_completion_length, trainer.max_completion_length)
    hint, hint_ids = shown_hint(sample.hint, tokenizer_of(trainer), longest)
    shown = with_hint(data["prompt"], hint, sample.template)
    return _Row(data, shown, prompt_tokens(trainer, shown), hint_ids)


def _sampled(
    trainer: HookedGRPOTrainer,
    samples: Sequence[Sample],
    rows: Sequence[_Row],
    environments: Environments,
    traced: bool,
) -> list[Sampled]:
    """Return this rank's rollouts of a batch. `traced`: whether log-probs of any rank's samples are requested."""
    shown = [{**row.data, "prompt": row.shown} for row in rows]
    generation = sampled_and_scored(trainer, shown, environments, judged_on=[row.data for row in rows])
    rewards = of_rank(trainer, total_rewards(trainer, generation.rewards).tolist())
    completions = generation.completion_ids
    trainer.model.eval()  # see above
    traces = _logprobs(trainer, rows, completions) if traced else None
    drawn = []
    for place, (sample, row) in enumerate(zip(samples, rows, strict=True)):
        ids = completions[place]
        drawn.append(
            Sampled(
                ids=tuple(ids),
                text=decode_completion(ids, tokenizer_of(trainer)),
                ended=ended(ids, trainer.eos_token_ids),
                reward=rewards[place],
                logprobs=traces[place] if traces is not None and sample.logprobs else None,
                hint_ids=row.hint_ids,
            )
        )
    return drawn


def _logprobs(trainer: HookedGRPOTrainer, rows: Sequence[_Row], completions: Sequence[Sequence[int]]) -> list[Any]:
    """Return the log-probs of each completion's tokens under its prompt as it was shown, at the sampling temperature,
    shape (T,): one forward pass per chunk of a training batch."""
    size, device = trainer.args.per_device_train_batch_size, trainer.accelerator.device
    pad = tokenizer_of(trainer).pad_token_id
    traces = []
    for start in range(0, len(rows), size):
        chunk = list(zip(rows[start : start + size], completions[start : start + size], strict=True))
        batch = as_batch(
            [as_tensor(row.prompt_ids) for row, _ in chunk], [as_tensor(ids) for _, ids in chunk], pad, device
        )
        logps = token_logps(trainer, trainer.model, *concatenated(batch)).float().cpu().numpy()
        traces += [logps[place, : len(ids)].copy() for place, (_, ids) in enumerate(chunk)]
    return traces
