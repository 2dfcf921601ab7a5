"""Runs of a model with tools outside of training, by the loop of TRL's trainer: for evaluations and diagnostics."""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import set_seed
from trl import GRPOConfig

from mutualrl.adapter.data import as_dataset
from mutualrl.adapter.trl_compat import HookedGRPOTrainer, evaluating, replaced, total_rewards
from mutualrl.adapter.trl_tools import Environments, greedy_decoding, sampled_and_scored
from mutualrl.engines.sampling import Sampling
from mutualrl.engines.transformers_engine import TransformersEngine
from mutualrl.errors import UsageError
from mutualrl.records import Completion, Prompt
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.base import TurnsSpec
from mutualrl.tasks.rewarding import rewards_of
from mutualrl.tasks.rewards import load_rewards
from mutualrl.tasks.turns import load_environment, load_tools
from mutualrl.thl import decode_completion, ended

if TYPE_CHECKING:
    from mutualrl.tasks.prompting import Template


class AgentRun(NamedTuple):
    """A run: its completion, with its messages; the number of tokens that the model sampled; its reward."""

    completion: Completion
    sampled: int
    reward: float


@dataclass
class AgentEngine:
    """A loaded model that acts with a task's tools or environment, and is judged by its rewards or its environment.

    `engine`: the model; `turns`: the tools; `rewards`: import paths of reward functions, with `weights` and the limit
    of a call in seconds, `timeout`; `template`: arguments of the chat template. An environment, which judges its own
    runs, has no limit.
    """

    engine: TransformersEngine
    turns: TurnsSpec
    rewards: Sequence[str]
    weights: Sequence[float] | None
    template: Template
    timeout: float
    batch_size: int = 64
    _environments: Environments = field(default_factory=lambda: defaultdict(list))

    def run(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_batch: Callable[[int], None] = lambda done: None
    ) -> list[list[AgentRun]]:
        """Return `sampling.samples` runs of every prompt. `on_batch` is called with the number of prompts done.

        Raises UsageError for a model whose chat template cannot write calls, RewardError for a reward that fails.
        """
        if not prompts:
            return []
        runs: list[list[AgentRun]] = []
        size = max(1, self.batch_size // sampling.samples)
        with tempfile.TemporaryDirectory(prefix="mutualrl-agents-") as scratch:
            trainer = self._trainer(prompts, sampling, scratch)
            set_seed(sampling.seed)
            with evaluating(trainer.model), torch.no_grad(), replaced(trainer, greedy_decoding(trainer, sampling)):
                for start in range(0, len(prompts), size):
                    part = prompts[start : start + size]
                    flat = self._batch(trainer, [prompt for prompt in part for _ in range(sampling.samples)])
                    runs += [flat[at : at + sampling.samples] for at in range(0, len(flat), sampling.samples)]
                    on_batch(len(part))
            del trainer
        gc.collect()  # TRL's trainer is in a cycle, and holds the model
        return runs

    def _batch(self, trainer: HookedGRPOTrainer, prompts: Sequence[Prompt]) -> list[AgentRun]:
        rows = list(as_dataset(prompts, self.engine.tokenizer))
        generation = sampled_and_scored(trainer, rows, self._environments)
        decode = partial(decode_completion, tokenizer=self.engine.tokenizer)
        completions, sampled = [], []
        for place, ids in enumerate(generation.completion_ids):
            written, mask = generation.written(place, decode)
            sampled.append(len(ids) if mask is None else sum(mask))
            completions.append(Completion(tuple(ids), written, ended(ids, trainer.eos_token_ids)))
        if self.turns.environment is None:
            answered = list(zip(prompts, completions, strict=True))
            rewards = rewards_of(self.rewards, self.weights, answered, self.engine.tokenizer, self.timeout)
        else:
            rewards = total_rewards(trainer, generation.rewards).tolist()
        return [AgentRun(*run) for run in zip(completions, sampled, rewards, strict=True)]

    def _trainer(self, prompts: Sequence[Prompt], sampling: Sampling, scratch: str) -> HookedGRPOTrainer:
        alone = self.turns.environment is None  # rewards are computed here
        turns: JsonObject = {"tools": load_tools(self.turns.tools, sampling.max_new_tokens)}
        if self.turns.environment is not None:
            turns["environment_factory"] = load_environment(
                self.turns.environment, owns_reward=not self.rewards, room=sampling.max_new_tokens
            )
        args = GRPOConfig(
            output_dir=scratch,
            use_cpu=self.engine.model.device.type == "cpu",
            bf16=False,
            report_to="none",
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=sampling.max_new_tokens,
            max_tool_calling_iterations=self.turns.iterations,
            temperature=sampling.temperature or 1.0,
            reward_weights=None if self.weights is None or alone else list(self.weights),
            chat_template_kwargs=dict(self.template),
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        try:
            return HookedGRPOTrainer(
                model=self.engine.model,
                reward_funcs=_unjudged if alone else load_rewards(self.rewards) or None,
                args=args,
                train_dataset=as_dataset(prompts, self.engine.tokenizer),
                processing_class=self.engine.tokenizer,
                **turns,
            )
        except ValueError as error:  # such as a chat template that cannot write calls
            raise UsageError(f"{self.engine.tokenizer.name_or_path}: {error}") from error


def _unjudged(completions: Sequence[object], **_: object) -> list[float]:
    """Return a reward in TRL's form that is not used."""
    return [0.0] * len(completions)
