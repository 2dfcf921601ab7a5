"""Rollouts that a regime requests: sampled by TRL now, with or without a hint, and judged on the prompt without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from mutualrl.adapter.trl_compat import (
    HookedGRPOTrainer,
    Inputs,
    evaluating,
    of_rank,
    token_logps,
    tokenizer_of,
    total_rewards,
)
from mutualrl.adapter.trl_tools import Environments, prompt_tokens, prompts_tokens, sampled_and_scored
from mutualrl.engines.scoring import context_length
from mutualrl.records import Ids, plain_ids
from mutualrl.regimes.hints import shown_hint, with_hint
from mutualrl.regimes.round import Sample, Sampled
from mutualrl.regimes.transfer import EncodedRun
from mutualrl.tasks.trajectories import own_words
from mutualrl.thl import decode_completion, ended
from mutualrl.training.tensors import as_batch, as_tensor, concatenated


def sampling_problems(trainer: HookedGRPOTrainer) -> list[str]:
    """Return why this trainer cannot answer a regime's requests for samples."""
    problems = []
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
    """A sample's data row, its hint as it is shown with its token ids, and the token ids of prompt and hint together;
    of a task with an environment, which adds to the prompt what it observes, they are not known before."""

    sample: Sample
    data: Inputs
    hint: str
    hint_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...] | None


@dataclass
class _Shown:
    """What a batch of samples is shown: prompts with hints, their token ids, and which rows are `usable`. A row is not
    whose shown prompt has more than `room` tokens, or whose prompt without the hint is not that of the round."""

    trainer: HookedGRPOTrainer
    rows: Sequence[_Row]
    room: int
    of_round: Mapping[str, Ids]
    prompt_ids: list[tuple[int, ...]] = field(default_factory=list)
    usable: list[bool] = field(default_factory=list)

    def __call__(self, prompts: list[Any]) -> list[Any]:
        """Return the prompts with their hints. `prompts`: as TRL generates from, with an environment's observation."""
        shown = [
            with_hint(prompt, row.hint, row.sample.template) for prompt, row in zip(prompts, self.rows, strict=True)
        ]
        known = [row.prompt_ids for row in self.rows if row.prompt_ids is not None]
        if len(known) == len(self.rows):
            self.prompt_ids, self.usable = known, [True] * len(known)
            return shown
        plain = prompts_tokens(self.trainer, prompts)
        self.prompt_ids = prompts_tokens(self.trainer, shown)
        for place, row in enumerate(self.rows):
            expected = self.of_round.get(row.sample.prompt_id)
            same = expected is None or plain_ids(expected) == plain[place]
            self.usable.append(same and len(self.prompt_ids[place]) <= self.room)
            if len(self.prompt_ids[place]) > self.room:
                shown[place], self.prompt_ids[place] = prompts[place], plain[place]  # dropped: ranks stay in step
        return shown


def samples_of(
    trainer: HookedGRPOTrainer,
    samples: Sequence[Sample],
    data: Mapping[str, Inputs],
    environments: Environments,
    of_round: Mapping[str, Ids] | None = None,
) -> dict[Sample, Sampled | None]:
    """Return the rollout of every sample, identical on all ranks, which must all call this with the same samples.

    `data`: the data row of each prompt; `of_round`: the token ids of those that the round has sampled. Samples are
    distributed round-robin, and all ranks sample equally many rows in equally many batches: the first sample fills up a
    rank that has fewer. TRL samples as in training, one rollout per row, from the generators that checkpoints save;
    dropout is off. One whose prompt leaves less room than
    `max_completion_length` is not sampled: None. A hint is cut to that length, too, unless the sample says less. With
    an environment, the prompt is known after its reset only: such a sample, and one whose prompt is not the round's,
    is drawn and dropped.
    """
    room = longest_sequence(trainer) - trainer.max_completion_length
    distinct: dict[object, _Row] = {}
    rows = {}
    for sample in samples:
        key = sample.prompt_id, sample.hint, sample.template, sample.max_hint_tokens
        if key not in distinct:
            distinct[key] = _row(trainer, sample, data[sample.prompt_id])
        rows[sample] = distinct[key]
    fitting = [sample for sample in samples if len(rows[sample].prompt_ids or ()) <= room]
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
            shown = _Shown(trainer, [rows[sample]._replace(sample=sample) for sample in filled], room, of_round or {})
            drawn = _sampled(trainer, shown, environments, traced)[: len(own)]
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
    if trainer.environment_factories is not None:
        return _Row(sample, data, hint, hint_ids, None)
    return _Row(sample, data, hint, hint_ids, prompt_tokens(trainer, with_hint(data["prompt"], hint, sample.template)))


def _sampled(
    trainer: HookedGRPOTrainer, shown: _Shown, environments: Environments, traced: bool
) -> list[Sampled | None]:
    """Return this rank's rollouts of a batch. `traced`: whether log-probs of any rank's samples are requested."""
    generation = sampled_and_scored(trainer, [row.data for row in shown.rows], environments, shown)
    rewards = of_rank(trainer, total_rewards(trainer, generation.rewards).tolist())
    completions = generation.completion_ids
    tokenizer = tokenizer_of(trainer)
    trainer.model.eval()  # see above
    traces = _logprobs(trainer, shown.prompt_ids, completions) if traced else None
    drawn: list[Sampled | None] = []
    for place, row in enumerate(shown.rows):
        if not shown.usable[place]:
            drawn.append(None)
            continue
        ids, words = completions[place], None
        written, mask = generation.written(place, partial(decode_completion, tokenizer=tokenizer))
        if mask is not None:
            words = tuple(tokenizer(own_words(written), add_special_tokens=False)["input_ids"])
        trace = traces[place] if traces is not None and row.sample.logprobs else None
        done = ended(ids, trainer.eos_token_ids)
        drawn.append(Sampled(EncodedRun(tuple(ids), mask), written, done, rewards[place], trace, row.hint_ids, words))
    return drawn


def _logprobs(
    trainer: HookedGRPOTrainer, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[Any]:
    """Return the log-probs of each completion's tokens under its prompt as it was shown, at the sampling temperature,
    shape (T,): one forward pass per chunk of a training batch."""
    size, device = trainer.args.per_device_train_batch_size, trainer.accelerator.device
    pad = tokenizer_of(trainer).pad_token_id
    traces = []
    for start in range(0, len(prompts), size):
        chunk = list(zip(prompts[start : start + size], completions[start : start + size], strict=True))
        batch = as_batch([as_tensor(ids) for ids, _ in chunk], [as_tensor(ids) for _, ids in chunk], pad, device)
        logps = token_logps(trainer, trainer.model, *concatenated(batch)).float().cpu().numpy()
        traces += [logps[place, : len(ids)].copy() for place, (_, ids) in enumerate(chunk)]
    return traces
