"""Greedy validation on the trainer's engine. It draws no random number, so training is unaffected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list, gather_object

from mutualrl.adapter.data import as_dataset
from mutualrl.adapter.trl_compat import evaluating, of_rank, replaced, tokenizer_of, total_rewards, whole_model
from mutualrl.adapter.trl_tools import Environments, greedy_decoding, sampled_and_scored
from mutualrl.engines.choice import engine_from_model
from mutualrl.engines.sampling import Sampling
from mutualrl.records import Completion, Prompt
from mutualrl.storage.run_info import Validation
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.tasks.rewarding import reward_arguments
from mutualrl.tasks.rewards import original, weighted
from mutualrl.tasks.scoring import score, score_rewards
from mutualrl.training.vllm_generation import greedy, greedy_engine

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Validator:
    """Greedy pass@1 of the model in training: one completion per prompt, scored by exact boxed match, or by the mean
    reward if the task has custom reward functions. With tools or an environment: the mean reward of one greedy rollout
    per prompt.

    The prompts are divided among the ranks; every rank returns the score of all.
    """

    def __init__(self, trainer: GRPOTrainer, prompts: Sequence[Prompt], batch_size: int = 64) -> None:
        self._trainer = trainer
        self._prompts = prompts
        self._batch_size = batch_size
        self._environments: Environments = defaultdict(list)

    def __call__(self) -> Validation:
        """Return the score of all prompts, on every rank."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        # Ranks with different numbers of batches would hang where a forward is a collective.
        per_rank = -(-len(self._prompts) // accelerator.num_processes)
        prompts = list(self._prompts[accelerator.process_index :: accelerator.num_processes])
        prompts += [self._prompts[0]] * (per_rank - len(prompts))
        if trainer.tools or trainer.environment_factories is not None:
            rewards = gather_object(list(zip([p.id for p in prompts], self._multi_turn_rewards(prompts), strict=True)))
            return score_rewards(self._prompts, [dict(rewards)[p.id] for p in self._prompts])
        completions = self._with_vllm(prompts) if trainer.use_vllm else self._with_transformers(prompts)
        by_id = dict(gather_object([(p.id, completion) for p, completion in zip(prompts, completions, strict=True)]))
        score: list[Validation | None] = [None]
        if accelerator.is_main_process:  # a reward may be slow, or cost money
            score = [self._score([by_id[p.id] for p in self._prompts])]
        validation: Validation | None = broadcast_object_list(score, from_process=0)[0]
        assert validation is not None
        return validation

    def _multi_turn_rewards(self, prompts: list[Prompt]) -> list[float]:
        """Return the reward of a greedy rollout of each prompt, sampled and scored by TRL; NaN where it has none."""
        trainer = self._trainer
        rewards: list[float] = []
        with evaluating(trainer.model), self._greedy():
            for first in range(0, len(prompts), self._batch_size):
                rows = list(as_dataset(prompts[first : first + self._batch_size], tokenizer_of(trainer)))
                scored = total_rewards(trainer, sampled_and_scored(trainer, rows, self._environments).rewards)
                rewards += of_rank(trainer, scored.tolist())
        return rewards

    @contextmanager
    def _greedy(self) -> Iterator[None]:
        """Make TRL decode greedily, without the sampling settings of training."""
        trainer = self._trainer
        if trainer.use_vllm:
            with greedy_engine(trainer):
                yield
            return
        with replaced(trainer, greedy_decoding(trainer)):
            yield

    def _with_transformers(self, prompts: list[Prompt]) -> list[Completion]:
        trainer = self._trainer
        with evaluating(trainer.model), whole_model(trainer) as model:
            engine = engine_from_model(model, tokenizer_of(trainer), self._batch_size)
            ids = prompt_ids([p.content for p in prompts], tokenizer_of(trainer), trainer.chat_template_kwargs)
            groups = engine.generate_ids(ids, Sampling(max_new_tokens=trainer.max_completion_length))
        return [group[0] for group in groups]

    def _with_vllm(self, prompts: list[Prompt]) -> list[Completion]:
        trainer = self._trainer
        return greedy(
            trainer, prompt_ids([p.content for p in prompts], tokenizer_of(trainer), trainer.chat_template_kwargs)
        )

    def _score(self, completions: list[Completion]) -> Validation:
        functions = self._trainer.reward_funcs
        if [original(function) for function in functions] == [boxed_reward]:
            return score(self._prompts, [completion.text for completion in completions])
        return score_rewards(self._prompts, self._rewards(completions))

    def _rewards(self, completions: list[Completion]) -> list[float]:
        """Return the weighted sum of the reward functions, called as in TRL; NaN where no function scores."""
        trainer = self._trainer
        answered = list(zip(self._prompts, completions, strict=True))
        arguments = reward_arguments(answered, tokenizer_of(trainer), trainer.state)
        weights = trainer.reward_weights.tolist()
        return weighted(trainer.reward_funcs, trainer.reward_func_names, weights, arguments)
