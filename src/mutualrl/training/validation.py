"""Greedy validation on the trainer's own engine. It draws no random number, so training goes on unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from trl.models.utils import unwrap_model_for_generation

from mutualrl.engines.base import Sampling
from mutualrl.engines.transformers_engine import TransformersEngine
from mutualrl.records import Prompt
from mutualrl.tasks.scoring import score


class Validator:
    """Greedy pass@1 of the model under training: one completion a prompt, exact boxed match.

    The prompts are shared out over the ranks; every rank returns the score of all.
    """

    def __init__(self, trainer: Any, prompts: Sequence[Prompt], batch_size: int = 64) -> None:
        self._trainer = trainer
        self._prompts = prompts
        self._batch_size = batch_size

    def __call__(self) -> dict[str, Any]:
        """The score as `{"n", "accuracy", "by_group", "no_box"}`."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        # Ranks with unequal shares would run unequal numbers of batches, and hang where a forward is a collective.
        share = -(-len(self._prompts) // accelerator.num_processes)
        mine = list(self._prompts[accelerator.process_index :: accelerator.num_processes])
        mine += [self._prompts[0]] * (share - len(mine))
        training = trainer.model.training
        trainer.model.eval()
        with unwrap_model_for_generation(
            trainer.model_wrapped, accelerator, gather_deepspeed3_params=trainer.args.ds3_gather_for_generation
        ) as model:
            engine = TransformersEngine(model, trainer._tokenizer, self._batch_size, trainer.chat_template_kwargs)
            sampling = Sampling(max_new_tokens=trainer.max_completion_length)
            groups = engine.generate([p.text for p in mine], sampling)
        trainer.model.train(training)
        answers = gather_object([(p.id, group[0].text) for p, group in zip(mine, groups, strict=True)])
        by_id = dict(answers)
        return score(self._prompts, [by_id[p.id] for p in self._prompts]).to_json()
