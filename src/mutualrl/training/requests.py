"""Results of a regime's requests: passages scored by the learner, responses by its reward functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset

from mutualrl.adapter.trl_compat import (
    HookedGRPOTrainer,
    Inputs,
    evaluating,
    reward_rows,
    token_logps,
    tokenizer_of,
    total_rewards,
)
from mutualrl.adapter.trl_tools import Environments, environment_of, observed, prompt_tokens
from mutualrl.errors import UsageError
from mutualrl.records import Ids, row_id
from mutualrl.regimes import Requests, Results
from mutualrl.regimes.round import Passage, Response
from mutualrl.storage.metrics import REQUESTED
from mutualrl.thl import retokenize
from mutualrl.thl.units import Floats
from mutualrl.training.extra_rows import logps_at_temperature_1
from mutualrl.training.samples import samples_of
from mutualrl.training.tensors import as_batch, as_tensor, concatenated

if TYPE_CHECKING:
    from trl import GRPOTrainer

Passages = Sequence[Passage]
Logps = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class PromptRows:
    """Rows of the trainer's data by prompt id, and the learner's token ids of their prompts. Read on first use."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._numbers: dict[str, int] | None = None
        self.environments: Environments = defaultdict(list)  # for samples, by name

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._by_id()

    def require_unique(self) -> None:
        """Raise UsageError if two rows have the same prompt id. Data that is not a `Dataset` is checked per round."""
        if isinstance(self._trainer.train_dataset, Dataset):
            self._by_id()

    def row(self, prompt_id: str) -> Inputs:
        """Return the data row of a prompt."""
        row: Inputs = self._trainer.train_dataset[self._by_id()[prompt_id]]
        return row

    def tokens(self, prompt_id: str, known: Mapping[str, Ids]) -> Ids:
        """Return a prompt's token ids: from the round's, `known`, or else from the data, with what an environment
        observes at a reset with its row."""
        if prompt_id in known:
            return known[prompt_id]
        environment = environment_of(self._trainer, self.row(prompt_id))
        return np.array(prompt_tokens(self._trainer, self.prompt(prompt_id), environment), dtype=np.int32)

    def prompt(self, prompt_id: str) -> Any:
        """Return a prompt from the data, with what an environment observes at a reset with its row."""
        row = self.row(prompt_id)
        with_environment = self._trainer.environment_factories is not None
        return observed(self._trainer, row, self.environments) if with_environment else row["prompt"]

    def _by_id(self) -> dict[str, int]:
        if self._numbers is None:
            data = self._trainer.train_dataset
            if not isinstance(data, Dataset):
                raise UsageError(
                    f"the regime looks up rows of data by prompt id: found {type(data).__name__} as train_dataset, "
                    "expected a datasets.Dataset"
                )
            self._numbers = {}
            for number, row in enumerate(data):
                if (first := self._numbers.setdefault(row_id(row), number)) != number:
                    raise UsageError(
                        f"rows {first} and {number} of train_dataset have the same prompt id {row_id(row)!r}, and a "
                        "round could pool them as one prompt; remove duplicates, or give every row its own prompt_id"
                    )
        return self._numbers


def results_of(
    trainer: HookedGRPOTrainer,
    requests: Requests,
    rows: PromptRows,
    prompts: Mapping[str, Ids],
    *,
    end_token_id: int | None,
) -> Results:
    """Return the results, identical on all ranks. All ranks must call this with the same requests.

    `prompts`: the learner's token ids of the round's prompts. `end_token_id`: the token that ends a response. Samples
    are drawn first: the passages and responses draw no random number.
    """
    asked = sorted({sample.prompt_id for sample in requests.samples})
    data = {key: rows.row(key) for key in asked}
    samples = samples_of(trainer, requests.samples, data, rows.environments, prompts)

    def sampling(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        return token_logps(trainer, trainer.model, ids, mask, keep)

    def plain(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        return logps_at_temperature_1(trainer, trainer.model, ids, mask, keep)

    prompt_ids = {prompt_id for prompt_id, _ in (*requests.logprobs, *requests.nll)}
    tokens = {prompt_id: rows.tokens(prompt_id, prompts) for prompt_id in sorted(prompt_ids)}
    logprobs = _score(trainer, requests.logprobs, tokens, sampling)
    nll = [-float(values.mean()) for values in _score(trainer, requests.nll, tokens, plain)]
    rewards = _rewards(trainer, requests.rewards, rows, end_token_id)
    return Results(
        dict(zip(requests.logprobs, logprobs, strict=True)),
        dict(zip(requests.nll, nll, strict=True)),
        dict(zip(requests.rewards, rewards, strict=True)),
        samples,
    )


def _score(trainer: GRPOTrainer, passages: Passages, prompts: Mapping[str, Ids], logps: Logps) -> list[Floats]:
    """Return the log-probs of each passage's tokens. Passages are distributed round-robin, and all ranks run equally
    many passes of equally many rows: the first passage fills up a rank that has fewer."""
    accelerator = trainer.accelerator
    ranks, size = accelerator.num_processes, trainer.args.per_device_train_batch_size
    results: list[Floats] = []
    pad, device = tokenizer_of(trainer).pad_token_id, accelerator.device
    with evaluating(trainer.model), torch.no_grad():
        for start in range(0, len(passages), size * ranks):
            block = passages[start : start + size * ranks]
            own = block[accelerator.process_index :: ranks]
            filled = [*own, *[passages[0]] * (-(-len(block) // ranks) - len(own))]
            batch = as_batch(
                [as_tensor(prompts[prompt_id]) for prompt_id, _ in filled],
                [as_tensor(ids) for _, ids in filled],
                pad,
                device,
            )
            scored = logps(*concatenated(batch))
            on_cpu = scored.double().cpu().numpy()  # copied once: each read from a GPU waits until the GPU is idle
            values = [on_cpu[row, : len(ids)].copy() for row, (_, ids) in enumerate(own)]
            by_rank = [values] if ranks == 1 else gather_object([values])
            results += [by_rank[index % ranks][index // ranks] for index in range(len(block))]
    return results


def _rewards(trainer: HookedGRPOTrainer, texts: Sequence[Response], rows: PromptRows, end: int | None) -> list[float]:
    """Return the learner's reward of each text. Each rank scores a part, all equally many texts. An environment judges
    its own runs only: NaN with one."""
    if not texts:
        return []
    if trainer.environment_factories is not None:
        return [math.nan] * len(texts)
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    per_rank = -(-len(texts) // ranks)
    padded = [*texts, *[texts[-1]] * (per_rank * ranks - len(texts))]
    own = padded[rank * per_rank : (rank + 1) * per_rank]
    inputs = [rows.row(prompt_id) for prompt_id, _, _ in own]
    tokenizer = tokenizer_of(trainer)
    ids = [list(retokenize(text, tokenizer, ended=ended, end_token_id=end).ids) for _, text, ended in own]
    rewards = total_rewards(trainer, reward_rows(trainer, inputs, [text for _, text, _ in own], ids))
    values: list[float] = rewards.tolist()
    return values[: len(texts)]


def counts_of(made: Sequence[Requests], results: Results) -> dict[str, int]:
    """Return how much was requested in a round, by the keys of `storage.metrics.REQUESTED`."""
    drawn = [sampled for sampled in results.samples.values() if sampled is not None]
    counts = (
        sum(requests.passages for requests in made),
        sum(len(ids) for each in made for _, ids in (*each.logprobs, *each.nll)),
        sum(len(requests.rewards) for requests in made),
        len(drawn),
        sum(sampled.tokens for sampled in drawn),
        len(results.samples) - len(drawn),
    )
    return dict(zip((metric.key for metric in REQUESTED), counts, strict=True))
