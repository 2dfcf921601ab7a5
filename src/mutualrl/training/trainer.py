"""TRL's GRPOTrainer with an exchange. Without one it is GRPOTrainer: same arguments, same results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from mutualrl.errors import RewardError, UsageError
from mutualrl.recipes.ratios import aggregation_problem, ratio_problems
from mutualrl.records import Rollout, row_id
from mutualrl.regimes import Answers, Plan, RoundView
from mutualrl.regimes.losses import BY_ROWS
from mutualrl.see.liveness import SCORING
from mutualrl.tasks.rewards import wrap_errors
from mutualrl.thl import decode_completion, ended
from mutualrl.training.answers import PromptRows, answer
from mutualrl.training.callback import SharingCallback
from mutualrl.training.checkpointing import Checkpointer, StepEnd, random_state, set_random_state
from mutualrl.training.extra_rows import ExtraRows
from mutualrl.training.sampled_text import require_sampled_text
from mutualrl.training.sharing import OwnBatch, PromptTokens, SharedRound, Sharing, remember
from mutualrl.training.state import load_state, save_state
from mutualrl.training.transfer import TokenTransfer
from mutualrl.training.trl_compat import (
    HookedGRPOTrainer,
    Inputs,
    evaluating,
    log_value,
    micro_step,
    micro_steps_per_round,
    replace_advantages,
    token_logps,
    tokenizer_of,
    total_rewards,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rank's generation batch as TRL scored it; `rewards` are this rank's, summed over reward functions."""

    inputs: list[Inputs]
    completion_ids: list[list[int]]
    rewards: list[float]


class MutualGRPOTrainer(HookedGRPOTrainer):
    """GRPOTrainer whose rounds are shared with peers. See GRPOTrainer for all arguments but two.

    Args:
        sharing: the exchange, peers and regime; None trains alone, exactly as GRPOTrainer does.
        checkpointer: keeps complete checkpoints in a run's directory; None keeps transformers' own. Either way a
            checkpoint has what a resumed run needs to continue bit for bit, which TRL's lacks: the generation batch in
            use.

    Raises UsageError when a regime meets settings under which its numbers would be off: `steps_per_generation` that is
    not a multiple of `gradient_accumulation_steps` (its means over the optimizer step would not be exact), a cut
    sampling distribution in the denominator of an importance ratio, or rewards that are normalised before they are
    summed.
    """

    def __init__(
        self, *args: object, sharing: Sharing | None = None, checkpointer: Checkpointer | None = None, **kwargs: object
    ) -> None:
        if sharing is not None and sharing.publishes("text"):  # refused before the model is built
            given = inspect.signature(GRPOTrainer).bind_partial(*args, **kwargs).arguments
            require_sampled_text(given, sharing.publisher_of("text"))
        super().__init__(*args, **kwargs)
        self.sharing = sharing
        self.checkpointer = checkpointer
        self.at_step_end = StepEnd(random_state(), 0)
        self._scored: _Scored | None = None
        self.extra_rows = ExtraRows(self, None if sharing is None else sharing.spec.row_metrics)
        if sharing is None:
            return
        if sharing.max_length is None:
            sharing.max_length = self.args.max_completion_length
        self.transfer = TokenTransfer(tokenizer_of(self), sharing.max_length, sharing.tokenizers)
        self.prompt_rows = PromptRows(self)
        self.add_callback(SharingCallback(sharing.link))
        self._check_settings(sharing)
        self.reward_funcs: list[Any] = [
            function if isinstance(function, torch.nn.Module) else wrap_errors(function, name, self._on_reward)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        embeddings = self.model.get_input_embeddings()  # which every pass reads, sampling's too, however it is wrapped
        embeddings.register_forward_pre_hook(lambda module, given: sharing.link.advance())

    def _check_settings(self, sharing: Sharing) -> None:
        """Raise UsageError for settings under which the regime would not compute what its spec states."""
        args, spec = self.args, sharing.spec
        settings = vars(args)
        problems = [
            f"{key}: {problem}"
            for key, problem in (
                *ratio_problems(settings, traced=sharing.traced),
                *aggregation_problem(settings, moves_advantages=spec.moves_advantages),
            )
        ]
        problems += self._dropout_problem(sharing)
        problems += [f"{key}: {problem}" for key, problem in spec.check(sharing.settings, settings)]
        if (stale := spec.staleness_problem(sharing.settings, sharing.link.staleness)) is not None:
            problems.append(f"staleness: {stale}")
        problems += [f"regime.{key}: {problem}" for key, problem in spec.idle_settings(sharing.settings)]
        if spec.reads_peers and args.steps_per_generation % args.gradient_accumulation_steps:
            problems.append(
                f"steps_per_generation ({args.steps_per_generation}) must be a multiple of "
                f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) for regime {spec.name!r}"
            )
        if problems:
            raise UsageError("; ".join(problems))

    def _dropout_problem(self, sharing: Sharing) -> list[str]:
        """Return why no pass would give the sampling policy's log-probs, where they are published."""
        dropout = max((m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
        if not sharing.publishes("logprobs") or dropout == 0 or self.use_vllm:
            return []
        return [
            f"dropout {dropout}: TRL samples with it, so that no pass gives the sampling policy's log-probs, which "
            f"{sharing.publisher_of('logprobs')} publishes; expected 0 (lora.dropout)"
        ]

    # ---- a round

    def on_generate(self, inputs: list[Inputs]) -> None:
        """Set the phase to sampling; let the regime begin some rollouts."""
        self.prefixes = None
        if self.sharing is None or not self.model.training:
            return
        self.sharing.link.set_phase("generating")
        if self.sharing.spec.prefixes is None:
            return
        first = self.accelerator.process_index * len(inputs)
        prefixes = self.sharing.prefixes(
            micro_step(self) // micro_steps_per_round(self),
            [row_id(example) for example in inputs],
            [(first + row) % self.num_generations for row in range(len(inputs))],
            group=self.num_generations,
            max_length=self.max_completion_length,
        )
        if any(gather_object([any(prefixes)])):  # every rank samples in the same way
            self.prefixes = prefixes

    def _on_reward(self, name: str) -> None:
        """Set the phase to the reward function that runs: it may be a judge that never answers."""
        if self.sharing is not None:
            self.sharing.link.set_phase(f"{SCORING}: reward function {name}")

    def scored(self, score: Callable[[], torch.Tensor], inputs: list[Inputs]) -> torch.Tensor:
        """Score with TRL's reward functions. Raises RewardError naming them for what is no reward."""
        if self.sharing is None:
            return score()
        self.sharing.link.set_phase(SCORING)
        names = ", ".join(self.reward_func_names)
        try:
            rewards = score()
        except (TypeError, ValueError) as error:  # what TRL finds wrong with what a function returned
            raise RewardError(f"reward function {names}: {type(error).__name__}: {error}") from error
        return rewards

    def on_rewards(self, inputs: list[Inputs], completion_ids: list[list[int]], rewards: torch.Tensor) -> None:
        """Keep the generation batch until TRL has computed its advantages."""
        if self.sharing is None or not self.model.training:
            return
        total = total_rewards(self, rewards)
        start = self.accelerator.process_index * len(inputs)
        self._scored = _Scored(inputs, completion_ids, total[start : start + len(inputs)].tolist())
        log_value(self, "rewards/unscorable", float(torch.isnan(total).sum()))

    def on_generated(self, batch: Inputs) -> None:
        """Share the round, once TRL has generated and verified."""
        if self.sharing is None or not self.model.training:
            return
        if self.sharing.active:
            self._share_round(self.sharing, batch)
        else:
            self._follow(self.sharing, gather_object(self._rewarded()))

    def _share_round(self, sharing: Sharing, batch: Inputs) -> None:
        """Run the data flow of a round. It knows no regime and executes what a plan contains."""
        round_index = micro_step(self) // micro_steps_per_round(self)
        own = self._collect(sharing, batch)  # TRL's batch as our nouns
        shared = sharing.sync(round_index, self.state.global_step, own, self.accelerator)  # SEE: publish, wait, read
        late = [(past, self._plan(sharing, past)) for past in shared.late]  # rounds of peers that were behind
        plan = self._plan(sharing, shared)  # pure; THL through `transfer`
        if plan.advantages is not None:
            replace_advantages(self, batch, plan.advantages)
        rows = [row for _, planned in (*late, (shared, plan)) for row in planned.rows]
        prompts = {row.prompt_id: self.prompt_rows.tokens(row.prompt_id, shared.prompts) for row in rows}
        self.extra_rows.load(rows, prompts, batch)
        for past, planned in late:
            self._log_rescues(sharing, past, planned)
        self._log_rescues(sharing, shared, plan)
        for name, value in plan.metrics.items():
            log_value(self, name, value)
        if sharing.link.staleness:
            log_value(self, "see/late_rows", float(len(rows) - len(plan.rows)))
        self._follow(sharing, shared.rollouts)

    def _plan(self, sharing: Sharing, shared: SharedRound) -> Plan:
        """Return the regime's plan for a round, this one or an earlier one that peers have published now."""
        view = self._view(sharing, shared)
        view = replace(view, answers=self._answers(sharing, view, shared))
        return sharing.plan(view, shared, self.accelerator)

    def _view(self, sharing: Sharing, shared: SharedRound) -> RoundView:
        """Return the round as the regime sees it."""
        other: frozenset[str] = frozenset()
        if not sharing.same_prompts:
            seen = {prompt_id for peer in shared.peers.values() for prompt_id in peer.column("prompt_id")}
            other = frozenset(prompt_id for prompt_id in seen - set(shared.prompts) if prompt_id in self.prompt_rows)
        return sharing.view(
            shared,
            self.transfer,
            scale=self.scale_rewards,
            mask_truncated=self.mask_truncated_completions,
            mean_over="rows" if self.loss_type in BY_ROWS else "tokens",
            clip=(self.epsilon_low, self.epsilon_high),
            other_prompts=other,
        )

    def _answers(self, sharing: Sharing, view: RoundView, shared: SharedRound) -> Answers:
        """Return what the regime must know before it plans: passages scored by this policy, texts by its rewards."""
        if not sharing.asks:
            return Answers()
        sharing.link.set_phase("scoring passages")
        needs = sharing.needs(view, self.accelerator)
        answers = answer(self, needs, self.prompt_rows, shared.prompts)
        tokens = sum(len(ids) for _, ids in (*needs.logprobs, *needs.nll))
        log_value(self, "plan/passages", float(needs.passages))
        log_value(self, "plan/passage_tokens", float(tokens))
        log_value(self, "plan/texts_scored", float(len(needs.rewards)))
        return answers

    def _follow(self, sharing: Sharing, rollouts: Sequence[Rollout]) -> None:
        for name, value in sharing.follow(rollouts).items():
            log_value(self, name, value)

    def compute_loss(
        self, model: PreTrainedModel, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return TRL's loss, with the round's extra rows."""
        own_loss = super().compute_loss
        if self.sharing is not None and self.model.training:
            self.sharing.link.set_phase("updating")
        if self.sharing is None or not self.model.training:
            alone: torch.Tensor = own_loss(model, inputs, return_outputs, num_items_in_batch)
            return alone

        def own(rows: Inputs) -> torch.Tensor:
            loss: torch.Tensor = own_loss(model, rows, return_outputs, num_items_in_batch)
            self._log_ppo_kl(rows)
            return loss

        return self.extra_rows.loss(model, inputs, own)

    def _rewarded(self) -> list[Rollout]:
        """Return this rank's rollouts with their rewards alone, each prompt under the hash of its text: of a policy
        that shares nothing, any data will do."""
        scored = self._scored
        assert scored is not None
        return [
            Rollout(row_id({"prompt": example.get("prompt")}), row, reward, ended=True)
            for row, (example, reward) in enumerate(zip(scored.inputs, scored.rewards, strict=True))
        ]

    def _collect(self, sharing: Sharing, batch: Inputs) -> OwnBatch:
        """Return this rank's rollouts. Texts are decoded only where they will be published."""
        scored, tokenizer = self._scored, tokenizer_of(self)
        assert scored is not None
        first = self.accelerator.process_index * len(scored.inputs)
        advantages, traces = batch["advantages"].tolist(), self._behaviour_trace(sharing, batch)
        rollouts: list[Rollout] = []
        prompts: PromptTokens = {}
        for row, example in enumerate(scored.inputs):
            ids, reward = scored.completion_ids[row], scored.rewards[row]
            prefix = 0 if self.prefixes is None else len(self.prefixes[row])
            key = row_id(example)
            remember(prompts, key, tuple(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()))
            rollouts.append(
                Rollout(
                    prompt_id=key,
                    index=(first + row) % self.num_generations,
                    reward=reward,
                    ended=ended(ids, self.eos_token_ids),
                    length=len(ids) - prefix,
                    advantage=advantages[row],
                    prompt=_prompt_text(example),
                    text=decode_completion(ids, tokenizer) if sharing.publishes_text(reward) else None,
                    token_ids=tuple(ids),
                    logprobs=None if traces is None or prefix else tuple(traces[row][: len(ids)].tolist()),
                    prefix=prefix,
                )
            )
        return OwnBatch(rollouts, prompts)

    def _behaviour_trace(self, sharing: Sharing, batch: Inputs) -> torch.Tensor | None:
        """Return the sampling policy's log-probs, shape (rows, T), where they are published: the sampling engine's own,
        else TRL's from before the update, else those of one forward pass, which draws no random number."""
        if not sharing.publishes("logprobs"):
            return None
        # TRL masks truncated rows before its passes: what it computed of them is of no use as a trace.
        usable = () if self.mask_truncated_completions else ("old_per_token_logps",)
        for key in ("sampling_per_token_logps", *usable):
            if key in batch:
                trace: torch.Tensor = batch[key].cpu()
                return trace
        assert self._scored is not None
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        lengths = torch.tensor([len(row) for row in self._scored.completion_ids], device=ids.device)
        sampled = torch.arange(batch["completion_ids"].size(1), device=ids.device) < lengths[:, None]
        mask = torch.cat([batch["prompt_mask"], sampled.to(batch["prompt_mask"].dtype)], dim=1)
        keep, size = batch["completion_ids"].size(1), self.args.per_device_train_batch_size
        with evaluating(self.model), torch.no_grad():
            logps = token_logps(self, self.model, ids, mask, keep, batch_size=size)
        return logps.cpu()

    def _log_rescues(self, sharing: Sharing, shared: SharedRound, plan: Plan) -> None:
        if sharing.rescues is not None and self.accelerator.is_main_process:
            text_of = self.transfer.text_of
            sharing.rescues.write(shared.number, self.state.global_step + 1, plan.rows, shared.rollouts, text_of)

    def _log_ppo_kl(self, inputs: Inputs) -> None:
        """Log `ppo_kl`: mean over own tokens of log pi_old - log pi (paper, Section "Optimization Diagnostics")."""
        old, mask = inputs.get("old_per_token_logps"), inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if old is None:  # the policy has not moved since it sampled
            log_value(self, "ppo_kl", 0.0)
            return
        sums = torch.stack([((old - self.last_logps) * mask).sum(), mask.sum().to(old.dtype)])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        log_value(self, "ppo_kl", total / max(count, 1.0))

    # ---- checkpoints

    def save_step(self, write: Callable[[], None], directory: str) -> None:
        """Write transformers' checkpoint with our state beside it; under a checkpointer complete, or not there."""
        if self.sharing is not None:
            self.sharing.link.set_phase("saving")
        if self.checkpointer is not None:
            self.checkpointer.save(self, write)
            return
        write()
        save_state(self, Path(directory) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def save_as_of_step_end(self) -> None:
        """Save a checkpoint of the last finished step, although a round has begun since: the weights have not moved,
        and the generators and the count of tokens are put back to where they were."""
        set_random_state(self.at_step_end.random)
        self.state.num_input_tokens_seen = self.at_step_end.tokens
        self.save_now()

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write TRL's card beside a checkpoint; under a checkpointer none."""
        if self.checkpointer is None:
            super().create_model_card(*args, **kwargs)

    def on_saved(self, directory: str) -> None:
        """Remove the arguments' pickle under a checkpointer: nothing reads it; recipe.yaml has every setting."""
        if self.checkpointer is not None:
            (Path(directory) / TRAINING_ARGS_NAME).unlink()

    def on_load(self, checkpoint: str) -> None:
        """Read our state back from a checkpoint."""
        load_state(self, checkpoint)

    def on_start(self) -> None:
        """Claim the policy as a new attempt where a script resumes."""
        if self.sharing is not None:
            self.sharing.claim_attempt(self.accelerator)


def _prompt_text(example: Inputs) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
