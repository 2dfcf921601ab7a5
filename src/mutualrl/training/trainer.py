"""TRL's GRPOTrainer with an exchange. Without one it is GRPOTrainer: same arguments, same results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from mutualrl.errors import RewardError, UsageError
from mutualrl.recipes.ratios import aggregation_problem, prp_problems, ratio_problems
from mutualrl.records import Record, prompt_id
from mutualrl.regimes import get_regime
from mutualrl.tasks.rewards import named
from mutualrl.thl import decode_completion, ended
from mutualrl.training.callback import SharingCallback
from mutualrl.training.checkpointing import Checkpointer, StepEnd, random_state, set_random_state
from mutualrl.training.pairs import PairTerm
from mutualrl.training.peer_rows import PeerRows
from mutualrl.training.rescues import OwnAnswer
from mutualrl.training.sharing import OwnRound, Sharing, remember
from mutualrl.training.state import load_state, save_state


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
        checkpointer: keeps complete checkpoints in a run's directory; None keeps transformers' own. Either way a
            checkpoint has what a resumed run needs to go on bit for bit, which TRL's lacks: the generation batch in
            use.

    Raises UsageError when a regime meets settings under which its numbers would be off: `steps_per_generation` that is
    not a multiple of `gradient_accumulation_steps` (its means over the optimizer step would not be exact), a cut
    sampling distribution below an importance ratio, or rewards that are normalised before they are summed.
    """

    def __init__(
        self, *args: Any, sharing: Sharing | None = None, checkpointer: Checkpointer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sharing = sharing
        self.checkpointer = checkpointer
        self.at_step_end = StepEnd(random_state(), 0)
        self._scored: _Scored | None = None
        self._pair_term = PairTerm(self)
        self._peer_rows = PeerRows(self)
        if sharing is None:
            return
        if sharing.max_length is None:
            sharing.max_length = self.args.max_completion_length
        self.add_callback(SharingCallback(sharing))
        self._check_settings(sharing)
        self.reward_funcs: list[Any] = [
            named(function, name) for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

    def _check_settings(self, sharing: Sharing) -> None:
        """Raise UsageError for settings under which the regime would not compute what it says."""
        args, spec = self.args, get_regime(sharing.regime)
        settings = vars(args)
        problems = [
            f"{key}: {problem}"
            for key, problem in (
                *ratio_problems(settings, traced=sharing.wants_trace),
                *aggregation_problem(settings, moves_advantages=spec.moves_advantages),
            )
        ]
        problems += self._what_a_peer_cannot_read(sharing)
        if spec.name == "prp":
            problems += [f"{key}: {problem}" for key, problem in prp_problems(settings, sharing.settings)]
        if spec.reads_peers and args.steps_per_generation % args.gradient_accumulation_steps:
            problems.append(
                f"steps_per_generation ({args.steps_per_generation}) must be a multiple of "
                f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) for regime {sharing.regime!r}"
            )
        if problems:
            raise UsageError("; ".join(problems))

    def _what_a_peer_cannot_read(self, sharing: Sharing) -> list[str]:
        """Rollouts that are not plain sampled text: a peer would train on what nobody sampled."""
        if "y_text" not in sharing.fields:
            return []
        found = {
            "tools": bool(self.tools),
            "environment_factory": self.environment_factories is not None,
            "rollout_func": self.rollout_func is not None,
            "a vision-language model": self._is_vlm,
        }
        lines = [
            f"{what}: not possible under regime {sharing.regime!r}, which shares texts" for what in found if found[what]
        ]
        dropout = max((m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
        if sharing.wants_trace and dropout > 0 and not self.use_vllm:
            lines.append(
                f"dropout {dropout}: TRL samples with it, so that no pass gives the sampling policy's log-probs, which "
                f"regime {sharing.regime!r} publishes; expected 0 (lora.dropout)"
            )
        return lines

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self.sharing is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        try:
            rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except (TypeError, ValueError) as error:  # what TRL finds wrong with what a function returned
            names = ", ".join(self.reward_func_names)
            raise RewardError(f"reward function {names}: {type(error).__name__}: {error}") from error
        if torch.isinf(rewards).any():
            raise RewardError(f"reward function {', '.join(self.reward_func_names)}: an infinite reward")
        if self.model.training:
            total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            total[torch.isnan(rewards).all(dim=1)] = torch.nan  # unscorable: neither success nor failure
            start = self.accelerator.process_index * len(inputs)
            self._scored = _Scored(inputs, completion_ids_list, total[start : start + len(inputs)].tolist())
            self._metrics["train"]["rewards/unscorable"].append(float(torch.isnan(total).sum()))
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.sharing is not None and not self.sharing.silent and self.model.training:
            self._share_round(self.sharing, batch)
        return batch

    def _share_round(self, sharing: Sharing, batch: dict[str, Any]) -> None:
        """The data flow of a round, after TRL has generated and verified:
        publish (SEE) -> wait, read peers (SEE) -> retokenise, align (THL) -> regime -> into the loss."""
        round_ = self._step // (self.args.steps_per_generation * self.num_iterations)
        shared = sharing.share(round_, self.state.global_step, self._own_round(batch), self)
        if shared.plan.advantages is not None:
            self._set_advantages(batch, shared.plan.advantages)
        self._pair_term.load(shared)
        self._peer_rows.load(shared, batch)
        if sharing.rescues is not None and shared.plan.pairs:
            own = self._answers_to({pair.prompt_id for pair in shared.plan.pairs})
            sharing.rescues.write(round_, self.state.global_step + 1, shared.plan.pairs, own, self.accelerator)
        for name, value in shared.plan.metrics.items():
            self._metrics["train"][name].append(value)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """TRL's loss, over the pool where peers' rows joined it, plus this micro-batch's share of the gated NLL."""
        if self.sharing is None or not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def own(rows: dict[str, Any]) -> torch.Tensor:
            loss = super(MutualGRPOTrainer, self).compute_loss(model, rows, return_outputs, num_items_in_batch)
            self._log_ppo_kl(rows)
            return loss

        loss = self._peer_rows.loss(model, inputs, own) if self._peer_rows.active else own(inputs)
        extra = self._pair_term.loss(model, inputs)
        return loss if extra is None else loss + extra

    # ---- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers' checkpoint with our state beside it; under a checkpointer whole, or not there at all."""
        if self.checkpointer is not None:
            self.checkpointer.save(self, lambda: super(MutualGRPOTrainer, self)._save_checkpoint(model, trial))
            return
        super()._save_checkpoint(model, trial)
        save_state(self, Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def save_as_of_step_end(self) -> None:
        """A checkpoint of the last finished step, although a round has begun since: the weights have not moved, and the
        generators and the count of tokens are put back to where they were."""
        set_random_state(self.at_step_end.random)
        self.state.num_input_tokens_seen = self.at_step_end.tokens
        self._save_checkpoint(self.model, None)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL writes one beside every checkpoint; under a checkpointer none is made there."""
        if self.checkpointer is None:
            super().create_model_card(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.checkpointer is not None:  # a pickle that nothing here reads; recipe.yaml says it all
            (Path(output_dir or self.args.output_dir) / TRAINING_ARGS_NAME).unlink()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_state(self, checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """transformers', with TRL's sampler moved past the finished epochs: its generator draws one order an epoch."""
        epochs, micro_batches = super()._init_training_state(*args, **kwargs)
        if self.sharing is not None:
            self.sharing.take_over(self.accelerator)
        if self._sampler.shuffle:
            for _ in range(epochs):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)
        return epochs, micro_batches

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; the log-probs of the last pass are kept for metrics, since TRL's loss does not return them."""
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.last_logps = found[0].detach()
        return found

    def _log_ppo_kl(self, inputs: dict[str, Any]) -> None:
        """`ppo_kl`: mean over own tokens of log pi_old - log pi (paper, Section "Optimization Diagnostics")."""
        old, mask = inputs.get("old_per_token_logps"), inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if old is None:  # the policy has not moved since it sampled
            self._metrics["train"]["ppo_kl"].append(0.0)
            return
        sums = torch.stack([((old - self.last_logps) * mask).sum(), mask.sum().to(old.dtype)])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._metrics["train"]["ppo_kl"].append(total / max(count, 1.0))

    def _set_advantages(self, batch: dict[str, Any], advantages: tuple[float, ...]) -> None:
        """Put the regime's advantages, of all ranks' rows, in place of TRL's; in TRL's table of completions too."""
        own = batch["advantages"]
        first = self.accelerator.process_index * len(own)
        batch["advantages"] = torch.tensor(advantages[first : first + len(own)], dtype=own.dtype, device=own.device)
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages)

    def _own_round(self, batch: dict[str, Any]) -> OwnRound:
        """This rank's rollouts as records. Text and ids are made only where they will be published."""
        scored, sharing = self._scored, self.sharing
        assert scored is not None and sharing is not None
        first = self.accelerator.process_index * len(scored.inputs)
        advantages, traces = batch["advantages"].tolist(), self._behaviour_trace(batch, sharing)
        records: list[Record] = []
        tokens: dict[str, tuple[int, ...]] = {}
        for row, example in enumerate(scored.inputs):
            ids, reward = scored.completion_ids[row], scored.rewards[row]
            key = _prompt_key(example)
            remember(tokens, key, tuple(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()))
            records.append(
                Record(
                    prompt_id=key,
                    rollout=(first + row) % self.num_generations,
                    reward=reward,
                    ended=ended(ids, self.eos_token_ids),
                    x_text=_prompt_text(example) if "x_text" in sharing.fields else None,
                    y_text=decode_completion(ids, self._tokenizer) if sharing.publishes_text(reward) else None,
                    advantage=advantages[row],
                    token_ids=tuple(ids) if "token_ids" in sharing.fields else None,
                    logprobs=None if traces is None else tuple(traces[row][: len(ids)].tolist()),
                )
            )
        return OwnRound(records, advantages, [len(ids) for ids in scored.completion_ids], tokens)

    def _answers_to(self, prompt_ids: set[str]) -> dict[str, list[OwnAnswer]]:
        """This rank's rollouts on some prompts, as texts."""
        scored = self._scored
        assert scored is not None
        first = self.accelerator.process_index * len(scored.inputs)
        found: dict[str, list[OwnAnswer]] = {}
        for row, example in enumerate(scored.inputs):
            if (key := _prompt_key(example)) in prompt_ids:
                text = decode_completion(scored.completion_ids[row], self._tokenizer)
                rollout = (first + row) % self.num_generations
                answer = OwnAnswer(rollout, _prompt_text(example), text, scored.rewards[row])
                found.setdefault(key, []).append(answer)
        return found

    def _behaviour_trace(self, batch: dict[str, Any], sharing: Sharing) -> torch.Tensor | None:
        """The sampling policy's log-probs, shape (rows, T), where they are published: the sampling engine's own, else
        TRL's from before the update, else those of one forward pass, which draws no random number."""
        if "logprobs" not in sharing.fields:
            return None
        # TRL masks truncated rows before its passes: what it computed of them is of no use as a trace.
        usable = () if self.mask_truncated_completions else ("old_per_token_logps",)
        for key in ("sampling_per_token_logps", *usable):
            if key in batch:
                return batch[key].cpu()
        if not sharing.wants_trace:
            return None  # `full` publishes what is there; it costs no pass
        assert self._scored is not None
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        lengths = torch.tensor([len(row) for row in self._scored.completion_ids], device=ids.device)
        sampled = torch.arange(batch["completion_ids"].size(1), device=ids.device) < lengths[:, None]
        mask = torch.cat([batch["prompt_mask"], sampled.to(batch["prompt_mask"].dtype)], dim=1)
        keep, size = batch["completion_ids"].size(1), self.args.per_device_train_batch_size
        self.model.eval()
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, keep, batch_size=size)
        self.model.train()
        return logps.cpu()


def _prompt_text(example: dict[str, Any]) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def _prompt_key(example: dict[str, Any]) -> str:
    """The data column `prompt_id`, or an id made of the prompt's text."""
    return str(example.get("prompt_id") or prompt_id("data", "train", "-", _prompt_text(example)))
