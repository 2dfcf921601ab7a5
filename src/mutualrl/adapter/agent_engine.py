"""Runs of a model with tools outside of training, by the loop of TRL's trainer: for evaluations and diagnostics."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

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
from mutualrl.tasks.base import TurnsSpec
from mutualrl.tasks.rewards import load_rewards
from mutualrl.tasks.trajectories import as_json, said
from mutualrl.tasks.turns import load_environment, load_tools
from mutualrl.thl import ended

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

    `engine`: the model; `turns`: the tools; `rewards`: import paths of reward functions, with `weights`; `template`:
    arguments of the chat template.
    """

    engine: TransformersEngine
    turns: TurnsSpec
    rewards: Sequence[str]
    weights: Sequence[float] | None
    template: Template
    max_new_tokens: int
    batch_size: int = 64
    _environments: Environments = field(default_factory=lambda: defaultdict(list))

    def run(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_batch: Callable[[int], None] = lambda done: None
    ) -> list[list[AgentRun]]:
        """Return `sampling.samples` runs of every prompt. `on_batch` is called with the number of prompts done."""
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
                    rows = [row for row in as_dataset(part, self.engine.tokenizer) for _ in range(sampling.samples)]
                    flat = self._batch(trainer, rows)
                    runs += [flat[at : at + sampling.samples] for at in range(0, len(flat), sampling.samples)]
                    on_batch(len(part))
        return runs

    def _batch(self, trainer: HookedGRPOTrainer, rows: list[dict[str, Any]]) -> list[AgentRun]:
        generation = sampled_and_scored(trainer, rows, self._environments)
        assert generation.turns is not None
        rewards = total_rewards(trainer, generation.rewards).tolist()
        runs = []
        for ids, turns, reward in zip(generation.completion_ids, generation.turns, rewards, strict=True):
            done = ended(ids, trainer.eos_token_ids)
            completion = Completion(tuple(ids), said(turns.messages), done, as_json(turns.messages))
            runs.append(AgentRun(completion, sum(turns.mask), reward))
        return runs

    def _trainer(self, prompts: Sequence[Prompt], sampling: Sampling, scratch: str) -> HookedGRPOTrainer:
        turns: dict[str, Any] = {"tools": load_tools(self.turns.tools)}
        if self.turns.environment is not None:
            turns["environment_factory"] = load_environment(self.turns.environment, owns_reward=not self.rewards)
        args = GRPOConfig(
            output_dir=scratch,
            use_cpu=self.engine.model.device.type == "cpu",
            bf16=False,
            report_to="none",
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=self.max_new_tokens,
            temperature=sampling.temperature or 1.0,
            reward_weights=None if self.weights is None else list(self.weights),
            chat_template_kwargs=dict(self.template),
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        try:
            return HookedGRPOTrainer(
                model=self.engine.model,
                reward_funcs=load_rewards(self.rewards) or None,
                args=args,
                train_dataset=as_dataset(prompts, self.engine.tokenizer),
                processing_class=self.engine.tokenizer,
                **turns,
            )
        except ValueError as error:  # such as a chat template that cannot write calls
            raise UsageError(f"{self.engine.tokenizer.name_or_path}: {error}") from error
