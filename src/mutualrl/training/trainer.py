"""TRL's GRPOTrainer with an exchange. Without one it is GRPOTrainer: same arguments, same results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer

from mutualrl.errors import UsageError
from mutualrl.records import Record, prompt_id
from mutualrl.regimes import get_regime
from mutualrl.thl import decode_completion, ended
from mutualrl.training.callback import SharingCallback
from mutualrl.training.pairs import PairTerm
from mutualrl.training.sharing import OwnRound, Sharing


@dataclass(frozen=True, slots=True)
class _Scored:
    """A rank's generation batch as TRL scored it; `rewards` are this rank's, summed over reward functions."""

    inputs: list[dict[str, Any]]
    completion_ids: list[list[int]]
    rewards: list[float]


class MutualGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose rounds are shared with peers. See GRPOTrainer for all arguments but one.

    Args:
        sharing: the exchange, peers and regime; None trains alone, exactly as GRPOTrainer does.

    Raises UsageError when a regime that adds pairs meets `steps_per_generation` that is not a multiple of
    `gradient_accumulation_steps`: its mean over the optimizer step would not be exact.
    """

    def __init__(self, *args: Any, sharing: Sharing | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sharing = sharing
        self._scored: _Scored | None = None
        self._pair_term = PairTerm(self)
        if sharing is None:
            return
        if sharing.max_length is None:
            sharing.max_length = self.args.max_completion_length
        self.add_callback(SharingCallback(sharing))
        if (
            get_regime(sharing.regime).reads_peers
            and self.args.steps_per_generation % self.args.gradient_accumulation_steps
        ):
            raise UsageError(
                f"steps_per_generation ({self.args.steps_per_generation}) must be a multiple of "
                f"gradient_accumulation_steps ({self.args.gradient_accumulation_steps}) for regime {sharing.regime!r}"
            )

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.sharing is not None:
            total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            total[torch.isnan(rewards).all(dim=1)] = torch.nan  # unscorable: neither success nor failure
            start = self.accelerator.process_index * len(inputs)
            self._scored = _Scored(inputs, completion_ids_list, total[start : start + len(inputs)].tolist())
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.sharing is not None and not self.sharing.silent and self.model.training:
            self._share_round(self.sharing, batch)
        return batch

    def _share_round(self, sharing: Sharing, batch: dict[str, Any]) -> None:
        """The data flow of a round, after TRL has generated and verified:
        publish (SEE) -> wait, read peers (SEE) -> retokenise (THL) -> regime -> into the loss."""
        round_ = self._step // (self.args.steps_per_generation * self.num_iterations)
        own = self._own_round(batch)
        shared = sharing.share(round_, self.state.global_step, own, self.accelerator, self._tokenizer)
        self._pair_term.load(shared)
        for name, value in shared.plan.metrics.items():
            self._metrics["train"][name].append(value)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """TRL's loss, plus this micro-batch's share of the gated NLL where there is one."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.sharing is None or not self.model.training:
            return loss
        extra = self._pair_term.loss(model, inputs)
        return loss if extra is None else loss + extra

    def _own_round(self, batch: dict[str, Any]) -> OwnRound:
        """This rank's rollouts as records. Text and ids are made only where they will be published."""
        scored, sharing = self._scored, self.sharing
        assert scored is not None and sharing is not None
        count = len(scored.inputs)
        first = self.accelerator.process_index * count
        threshold = get_regime(sharing.regime).text_above(sharing.settings)
        advantages = batch["advantages"].tolist()
        records, tokens = [], {}
        for row, example in enumerate(scored.inputs):
            ids, reward = scored.completion_ids[row], scored.rewards[row]
            text_wanted = "y_text" in sharing.fields and (sharing.publish == "full" or reward > threshold)
            key = _prompt_key(example)
            if key not in tokens:
                tokens[key] = tuple(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist())
            records.append(
                Record(
                    prompt_id=key,
                    rollout=(first + row) % self.num_generations,
                    reward=reward,
                    ended=ended(ids, self.eos_token_ids),
                    x_text=_prompt_text(example) if "x_text" in sharing.fields else None,
                    y_text=decode_completion(ids, self._tokenizer) if text_wanted else None,
                    advantage=advantages[row],
                    token_ids=tuple(ids) if "token_ids" in sharing.fields else None,
                    logprobs=_trace(batch, row, len(ids)) if "logprobs" in sharing.fields else None,
                )
            )
        return OwnRound(records, tokens)


def _prompt_text(example: dict[str, Any]) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def _prompt_key(example: dict[str, Any]) -> str:
    """The data column `prompt_id`, or an id made of the prompt's text."""
    return str(example.get("prompt_id") or prompt_id("data", "train", "-", _prompt_text(example)))


def _trace(batch: dict[str, Any], row: int, length: int) -> tuple[float, ...] | None:
    """The behaviour policy's log-probs where the sampling engine gave them."""
    traces = batch.get("sampling_per_token_logps")
    return None if traces is None else tuple(traces[row][:length].tolist())
