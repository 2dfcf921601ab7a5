"""Dynamic sampling in TRL: groups whose rewards are all equal are replaced by those of further prompts.

It is done on whole generation batches, in gathered order, where a group is `num_generations` consecutive rows: a group
may have its rows on several ranks, and all ranks sample equally many batches. The arithmetic is in `regimes.resample`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from trl.trainer.utils import pad

from mutualrl.adapter.trl_compat import (
    Dropped,
    GenerationBatch,
    HookedGRPOTrainer,
    Inputs,
    ScoredBatch,
    Turns,
    has_trl_loss,
    last_value,
    log_value,
    micro_step,
    micro_steps_per_round,
    of_rank,
    replace_advantages,
    replace_completion_table,
    tokenizer_of,
    total_rewards,
)
from mutualrl.errors import UsageError
from mutualrl.regimes.resample import (
    Resample,
    SampledGroup,
    batch_scaled,
    differing,
    filled,
    further_rows,
    missing,
    order_of,
)
from mutualrl.regimes.run_problems import equal_sums_problem
from mutualrl.storage.metrics import RESAMPLE_ATTEMPTS, RESAMPLE_DROPPED, RESAMPLE_MISSING, RESAMPLE_TOKENS
from mutualrl.training.round_prompts import id_or_prompt

#: what fills the columns after a completion, by key of the generation batch; the masks hide all of them
_AFTER: dict[str, float] = {
    "completion_mask": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
}
_PROMPT, _COMPLETION = ("prompt_ids", "prompt_mask"), ("completion_ids", *_AFTER)
_PER_ROW, _OF_BATCH = ("advantages",), ("num_items_in_batch",)


def resampling_problems(trainer: HookedGRPOTrainer) -> list[str]:
    """Return why this trainer cannot sample further prompts."""
    problems = []
    if not isinstance(trainer.train_dataset, Dataset):
        problems.append(
            f"train_dataset: found {type(trainer.train_dataset).__name__}, expected a datasets.Dataset: further "
            "prompts are rows of it"
        )
    elif pictures := {"image", "images"} & set(trainer.train_dataset.column_names):
        problems.append(
            f"train_dataset: found a column {min(pictures)!r}, expected prompts of text: a row may have several "
            "images, and a batch of them is not put together anew"
        )
    problems += [f"{key}: {problem}" for key, problem in equal_sums_problem(vars(trainer.args))]
    if trainer.args.remove_unused_columns:
        problems.append(
            "remove_unused_columns: found True, expected False: further prompts are rows of the data with all columns"
        )
    if not has_trl_loss(trainer):
        problems.append(
            f"{type(trainer).__name__} overrides TRL's loss, which may read more of a batch than is put together anew; "
            "expected GRPOTrainer's loss"
        )
    return problems


@dataclass
class Attempts:
    """Batches that a round has sampled: the data rows' prompt ids by place, and whether the rewards of the group there
    differ."""

    trainer: HookedGRPOTrainer
    sampled: list[ScoredBatch] = field(default_factory=list)
    prompts: list[list[str]] = field(default_factory=list)
    live: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def sample(self, inputs: list[Inputs], prompts: list[str]) -> None:
        """Sample a batch: this rank's data rows, and the prompt ids of all ranks' groups."""
        replace_completion_table(self.trainer, {})  # else a column that this batch lacks keeps the rows of the last one
        part = self.trainer.sample_batch(inputs)
        self.sampled.append(part)
        self.prompts.append(prompts)
        self.live.append(differing(self.rewards(part), self.trainer.num_generations))

    def rewards(self, part: ScoredBatch) -> npt.NDArray[np.float64]:
        """Return the rewards of all ranks' rollouts, summed over reward functions, shape (rows,)."""
        rewards: npt.NDArray[np.float64] = total_rewards(self.trainer, part.generation.rewards).double().cpu().numpy()
        return rewards

    def groups(self) -> list[SampledGroup]:
        """Return the group at each place of the batch to train on."""
        return filled(self.prompts, self.live)

    def missing(self) -> int:
        """Return the number of places whose group has equal rewards."""
        return missing(self.groups(), self.live)

    def next_rows(self, attempt: int) -> list[int]:
        """Return the rows of data of an attempt, one per group; none if all data are trained on."""
        data, seed = self.trainer.train_dataset, self.trainer.args.seed
        number = micro_step(self.trainer) // micro_steps_per_round(self.trainer)
        trained = {
            self.prompts[group.batch][group.place] for group in self.groups() if self.live[group.batch][group.place]
        }
        sampled = {prompt_id for prompts in self.prompts for prompt_id in prompts}
        order = order_of(len(data), seed, number, attempt)
        return further_rows(order, lambda row: id_or_prompt(data[row]), sampled, trained, len(self.prompts[0]))


def resampled_round(
    trainer: HookedGRPOTrainer, settings: Resample, inputs: list[Inputs]
) -> tuple[Inputs, GenerationBatch]:
    """Sample a round until the rewards of every group differ, at most `max_attempts` further batches; log what it took.
    All ranks must call this together."""
    data, size = trainer.train_dataset, trainer.num_generations
    attempts, tokens = Attempts(trainer), 0.0
    attempts.sample(inputs, gather_object([id_or_prompt(row) for row in inputs])[::size])
    for attempt in range(1, settings.max_attempts + 1):
        rows = attempts.next_rows(attempt) if attempts.missing() else []
        if not rows:
            break
        own = of_rank(trainer, [row for row in rows for _ in range(size)])
        attempts.sample([dict(data[row]) for row in own], [id_or_prompt(data[row]) for row in rows])
        tokens += last_value(trainer, "completions/mean_length") * len(rows) * size
    equal = sum(int((~live).sum()) for live in attempts.live)
    log_value(trainer, RESAMPLE_ATTEMPTS.key, float(len(attempts.sampled) - 1))
    log_value(trainer, RESAMPLE_DROPPED.key, float(equal - attempts.missing()))
    log_value(trainer, RESAMPLE_MISSING.key, float(attempts.missing()))
    log_value(trainer, RESAMPLE_TOKENS.key, float(round(tokens)))
    return _put_together(attempts)


# ---- the batch to train on


class RolloutRow(NamedTuple):
    """A rollout on its way into another batch: its values by key, without padding, its data row, and with tools its
    turns."""

    values: dict[str, torch.Tensor]
    data: Inputs
    completion_ids: list[int]
    turns: Sequence[Turns] = ()


def _put_together(attempts: Attempts) -> tuple[Inputs, GenerationBatch]:
    """Return the batch of the groups to train on, and what is dropped."""
    trainer, sampled, groups = attempts.trainer, attempts.sampled, attempts.groups()
    size = trainer.num_generations
    places = [(group.batch, group.place * size + row) for group in groups for row in range(size)]  # in gathered order
    replace_completion_table(trainer, _table(sampled, places))
    if len(sampled) == 1:
        return sampled[0].batch, sampled[0].generation
    rows = _moved(trainer, sampled, places)
    rewards = torch.stack([sampled[number].generation.rewards[row] for number, row in places])
    batch = _batch(trainer, rows, like=sampled[0].batch)
    if trainer.scale_rewards == "batch":
        totals = total_rewards(trainer, rewards).double().cpu().numpy()
        replace_advantages(trainer, batch, batch_scaled(totals, size).tolist())
    indices = _indices(attempts.prompts, groups, size)
    generation = GenerationBatch(
        [row.data for row in rows],
        [row.completion_ids for row in rows],
        rewards,
        of_rank(trainer, [indices[number][row] for number, row in places]),
        _dropped(trainer, sampled, places, indices),
        [turns for row in rows for turns in row.turns],
    )
    return batch, generation


def _moved(
    trainer: HookedGRPOTrainer, sampled: Sequence[ScoredBatch], places: Sequence[tuple[int, int]]
) -> list[RolloutRow]:
    """Return this rank's rows of the batch to train on, wherever they were sampled. `places`: of all ranks' rows, the
    batch and the row in gathered order."""
    per_rank, rank = len(sampled[0].generation.inputs), trainer.accelerator.process_index
    on_cpu = [_on_cpu(part.batch) for part in sampled]  # copied once: each read from a GPU waits until the GPU is idle
    sent: dict[tuple[int, int], RolloutRow] = {}
    for number, row in places:
        if row // per_rank == rank:
            sent[number, row] = _row(on_cpu[number], sampled[number].generation, row % per_rank)
    received: dict[tuple[int, int], RolloutRow] = {}
    for part in gather_object([sent]):
        received |= part
    return [received[place] for place in of_rank(trainer, places)]


def _dropped(
    trainer: HookedGRPOTrainer,
    sampled: Sequence[ScoredBatch],
    places: Sequence[tuple[int, int]],
    indices: Sequence[Sequence[int]],
) -> tuple[Dropped, ...]:
    """Return each batch with this rank's rows that are not trained on. `indices`: of the rollouts, by batch and row."""
    trained, dropped = set(places), []
    for number, part in enumerate(sampled):
        rows = of_rank(trainer, range(len(part.generation.rewards)))
        left = [place for place, row in enumerate(rows) if (number, row) not in trained]
        numbered = part.generation._replace(indices=of_rank(trainer, indices[number]))
        dropped.append(Dropped(part.batch, numbered, left))
    return tuple(dropped)


def _table(sampled: Sequence[ScoredBatch], places: Sequence[tuple[int, int]]) -> dict[str, list[object]]:
    """Return the columns of TRL's table of completions for rows of these batches; None where a batch lacks a column."""
    table: dict[str, list[object]] = {}
    for name in {name for part in sampled for name, column in part.logged.items() if column}:
        columns = [part.logged.get(name) or [None] * len(places) for part in sampled]
        table[name] = [columns[number][row] for number, row in places]
    return table


def _indices(prompts: Sequence[Sequence[str]], groups: Sequence[SampledGroup], size: int) -> list[list[int]]:
    """Return the index of every row of every batch, in gathered order: the number of the rollout among those of its
    prompt in this round, those that are trained on first."""
    trained = set(groups)
    sampled = [SampledGroup(batch, place) for batch, ids in enumerate(prompts) for place in range(len(ids))]
    seen = Counter[str]()
    first: dict[SampledGroup, int] = {}
    for group in sorted(sampled, key=lambda group: group not in trained):
        prompt_id = prompts[group.batch][group.place]
        first[group] = seen[prompt_id] * size
        seen[prompt_id] += 1
    indices = []
    for batch, ids in enumerate(prompts):
        indices.append([first[SampledGroup(batch, place)] + row for place in range(len(ids)) for row in range(size)])
    return indices


def _on_cpu(batch: Inputs) -> Inputs:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _row(batch: Inputs, generation: GenerationBatch, row: int) -> RolloutRow:
    """Return a row of a batch without padding. Raises UsageError for a key that is not known here: an
    image's, of which a row has as many as it likes."""
    ids = generation.completion_ids[row]
    shown = batch["prompt_mask"][row] != 0
    values = {}
    for key, value in batch.items():
        if key in _PROMPT:
            values[key] = value[row][shown].clone()
        elif key in _COMPLETION:
            values[key] = value[row][: len(ids)].clone()
        elif key in _PER_ROW:
            values[key] = value[row].clone()
        elif key not in _OF_BATCH:
            raise UsageError(
                f"round.resample: TRL's batch has {key!r}, which cannot be put together anew; expected prompts of text "
                "(leave round.resample out)"
            )
    return RolloutRow(values, generation.inputs[row], ids, generation.turns[row : row + 1])


def _batch(trainer: HookedGRPOTrainer, rows: Sequence[RolloutRow], like: Inputs) -> Inputs:
    """Return rows as a generation batch, padded as TRL pads them, with the number of all ranks' tokens in the loss."""
    token, multiple = tokenizer_of(trainer).pad_token_id, trainer.pad_to_multiple_of
    batch: Inputs = {}
    for key, value in like.items():
        if key in _OF_BATCH:
            continue
        column = [row.values[key] for row in rows]
        if key in _PER_ROW or (value.dim() > 1 and value.size(1) == 1 < like["completion_ids"].size(1)):
            batch[key] = torch.stack(column).to(value.device)  # also a ratio per sequence, shape (rows, 1)
            continue
        fill = token if key.endswith("_ids") else _AFTER.get(key, 0)
        side = "left" if key in _PROMPT else "right"
        filled_up = pad(column, padding_value=fill, padding_side=side, pad_to_multiple_of=multiple)
        batch[key] = filled_up.to(value.device)
    in_loss = batch["completion_mask"] * batch.get("tool_mask", 1)
    batch["num_items_in_batch"] = trainer.accelerator.gather(in_loss.sum()).sum()
    return batch
