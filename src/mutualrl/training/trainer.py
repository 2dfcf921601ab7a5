"""TRL's GRPOTrainer with an exchange. Without one it equals GRPOTrainer: same arguments, same results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from mutualrl.engines.generation_defaults import neutralize
from mutualrl.engines.model_files import require_loadable, require_no_adapter
from mutualrl.errors import RewardError, UsageError
from mutualrl.recipes.ratios import aggregation_problem, ratio_problems
from mutualrl.records import Rollout, row_id
from mutualrl.regimes import Plan, Requests, RoundView, whitened_plan
from mutualrl.regimes.advantages import whiten
from mutualrl.regimes.losses import BY_ROWS
from mutualrl.regimes.round import PHASES
from mutualrl.see.liveness import SCORING
from mutualrl.tasks.rewards import adapt, distinct_names
from mutualrl.thl import decode_completion, end_token, ended, last_tokens
from mutualrl.thl.table import table_of
from mutualrl.tiny import is_embedded
from mutualrl.training.callback import MetricsCallback, SharingCallback
from mutualrl.training.checkpointing import Checkpointer, StepEnd, random_state, set_random_state
from mutualrl.training.extra_rows import ExtraRows
from mutualrl.training.requests import PromptRows, results_of
from mutualrl.training.sampled_text import require_sampled_text
from mutualrl.training.script_run import ScriptRunCallback
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
    """One rank's generation batch as scored by TRL; `rewards` are this rank's, summed over reward functions."""

    inputs: list[Inputs]
    completion_ids: list[list[int]]
    rewards: list[float]


class MutualGRPOTrainer(HookedGRPOTrainer):
    """GRPOTrainer whose rounds are shared with peers. See GRPOTrainer for all other arguments.

    Args:
        sharing: the exchange, peers and regime; None trains alone, exactly as GRPOTrainer does.
        checkpointer: writes complete checkpoints in a run's directory; None uses transformers' own. Either way a
            checkpoint has the generation batch in use, which TRL's lacks, so that a resumed run continues bit for bit.

    Raises UsageError for settings under which a regime would compute wrong numbers: `steps_per_generation` that is not
    a multiple of `gradient_accumulation_steps` (means over the optimizer step would not be exact), a truncated sampling
    distribution in the denominator of an importance ratio, or rewards that are normalized before they are summed.
    """

    def __init__(
        self, *args: object, sharing: Sharing | None = None, checkpointer: Checkpointer | None = None, **kwargs: object
    ) -> None:
        if sharing is not None:  # checked before the model is built
            arguments = inspect.signature(GRPOTrainer).bind_partial(*args, **kwargs).arguments
            if sharing.publishes("text"):
                require_sampled_text(arguments, sharing.publisher_of("text"))
            _require_loadable(arguments)
        super().__init__(*args, **kwargs)
        self.sharing = sharing
        self.checkpointer = checkpointer
        self.at_step_end = StepEnd(random_state(), 0)
        self._scored: _Scored | None = None
        self.declared_generation = self.model.generation_config
        self.extra_rows = ExtraRows(self, None if sharing is None else sharing.regime.row_metrics)
        if sharing is None:
            return
        self.declared_generation = neutralize(self.model)
        if sharing.max_length is None:
            sharing.max_length = self.args.max_completion_length
        self.transfer = TokenTransfer(tokenizer_of(self), sharing.max_length, sharing.tokenizers)
        self._set_end_token(sharing)
        self._require_tokenizers(sharing)
        self.prompt_rows = PromptRows(self)
        if sharing.script is not None:  # the command makes unique ids
            self.prompt_rows.require_unique()
        if sharing.script is not None:
            self.add_callback(ScriptRunCallback(self, sharing.script))
            self.add_callback(MetricsCallback(sharing.script.run.policy(sharing.link.policy).metrics))
        self.add_callback(SharingCallback(sharing.link))
        self._check_settings(sharing)
        self.reward_func_names: list[str] = distinct_names(self.reward_func_names)
        self.reward_funcs: list[Any] = [
            function
            if isinstance(function, torch.nn.Module)
            else adapt(function, name, self._on_reward, self._on_reward_returned)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        embeddings = self.model.get_input_embeddings()  # used by every forward, also in sampling, however wrapped
        embeddings.register_forward_pre_hook(lambda module, inputs: sharing.link.advance())

    def _check_settings(self, sharing: Sharing) -> None:
        """Raise UsageError for settings under which the regime would not compute what it declares."""
        args, regime = self.args, sharing.regime
        settings = vars(args)
        problems = [
            f"{key}: {problem}"
            for key, problem in (
                *ratio_problems(settings, traced=sharing.traced),
                *aggregation_problem(settings, moves_advantages=regime.moves_advantages()),
            )
        ]
        problems += self._dropout_problem(sharing)
        problems += [f"whiten_advantages: {problem}" for problem in regime.whitening_problem(whiten=sharing.whiten)]
        problems += [f"{key}: {problem}" for key, problem in regime.problems(settings)]
        if (stale := regime.staleness_problem(sharing.link.staleness)) is not None:
            problems.append(f"staleness: {stale}")
        problems += [f"regime.{key}: {problem}" for key, problem in regime.ineffective_settings()]
        if regime.reads_peers and args.steps_per_generation % args.gradient_accumulation_steps:
            problems.append(
                f"steps_per_generation ({args.steps_per_generation}) must be a multiple of "
                f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) for regime {regime.name!r}"
            )
        if problems:
            raise UsageError("; ".join(problems))

    def _require_tokenizers(self, sharing: Sharing) -> None:
        """Raise TokenizerError if traces are to be aligned and the THL does not support a tokenizer of the pool."""
        if sharing.publishes("token_ids") and sharing.traced:
            for tokenizer in (tokenizer_of(self), *sharing.tokenizers.values()):
                table_of(tokenizer)

    def _dropout_problem(self, sharing: Sharing) -> list[str]:
        """Return why no pass reproduces the sampling policy's log-probs, where they are published."""
        dropout = max((m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)), default=0.0)
        if not sharing.publishes("logprobs") or dropout == 0 or self.use_vllm:
            return []
        return [
            f"dropout {dropout}: TRL samples with it, so no pass reproduces the sampling policy's log-probs, which "
            f"{sharing.publisher_of('logprobs')} publishes; expected 0 (lora.dropout)"
        ]

    # ---- a round

    def on_generate(self, inputs: list[Inputs]) -> None:
        """Set the phase to generating, and the rollouts' prefixes if the regime has any."""
        self.prefixes = None
        if self.sharing is None or not self.model.training:
            return
        self.sharing.link.set_phase("generating")
        if not self.sharing.regime.guides:
            return
        first = self.accelerator.process_index * len(inputs)
        prefixes = self.sharing.prefixes(
            micro_step(self) // micro_steps_per_round(self),
            [row_id(example) for example in inputs],
            [(first + row) % self.num_generations for row in range(len(inputs))],
            group=self.num_generations,
            max_length=self.max_completion_length,
        )
        if any(gather_object([any(prefixes)])):  # all ranks must sample in the same mode
            self.prefixes = prefixes

    def _on_reward(self, name: str) -> None:
        """Set the phase to the running reward function: it may hang, or end the process."""
        if self.sharing is not None:
            self.sharing.link.set_phase(f"{SCORING}: reward function {name}", at_once=True)

    def _on_reward_returned(self) -> None:
        """Set the phase back: what ends the process from here on is not the reward function."""
        if self.sharing is not None:
            self.sharing.link.set_phase(SCORING, at_once=True)

    def scored(self, score: Callable[[], torch.Tensor], inputs: list[Inputs]) -> torch.Tensor:
        """Score with TRL's reward functions. Raises RewardError naming them if the result is not a reward."""
        if self.sharing is None:
            return score()
        self.sharing.link.set_phase(SCORING)
        names = ", ".join(self.reward_func_names)
        try:
            rewards = score()
        except (TypeError, ValueError) as error:  # raised by TRL for an invalid return value
            raise RewardError(f"reward function {names}: {type(error).__name__}: {error}") from error
        return rewards

    def on_rewards(self, inputs: list[Inputs], completion_ids: list[list[int]], rewards: torch.Tensor) -> None:
        """Store the generation batch until TRL has computed its advantages."""
        if self.sharing is None or not self.model.training:
            return
        total = total_rewards(self, rewards)
        start = self.accelerator.process_index * len(inputs)
        self._scored = _Scored(inputs, completion_ids, total[start : start + len(inputs)].tolist())
        log_value(self, "rewards/unscorable", float(torch.isnan(total).sum()))

    def on_generated(self, batch: Inputs) -> None:
        """Share the round after TRL has sampled and scored it."""
        if self.sharing is None or not self.model.training:
            return
        if self.sharing.whiten:
            self._whiten(batch)
        if self.sharing.active:
            self._share_round(self.sharing, batch)
        else:
            self._follow(self.sharing, gather_object(self._rewarded()))

    def _whiten(self, batch: Inputs) -> None:
        """Whiten TRL's advantages over the round's rollouts of all ranks (`round.whiten_advantages`)."""
        assert self._scored is not None
        own = zip(batch["advantages"].tolist(), self._scored.rewards, strict=True)
        advantages, rewards = zip(*gather_object(list(own)), strict=True)
        whitened = whiten(advantages, [not math.isnan(reward) for reward in rewards])
        replace_advantages(self, batch, whitened.tolist())

    def _share_round(self, sharing: Sharing, batch: Inputs) -> None:
        """Run the data flow of a round, independent of the regime: execute the regime's plan."""
        round_index = micro_step(self) // micro_steps_per_round(self)
        own = self._collect(sharing, batch)  # TRL's batch as rollouts
        shared = sharing.sync(round_index, self.state.global_step, own, self.accelerator)  # SEE: publish, wait, read
        self._set_end_token(sharing, shared.rollouts)
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

    def _set_end_token(self, sharing: Sharing, rollouts: Sequence[Rollout] = ()) -> None:
        """End the texts that the policy learns as it ends its own: count the end tokens of its rollouts."""
        sharing.end_tokens.update(last_tokens((rollout.token_ids, rollout.ended) for rollout in rollouts))
        end = end_token(tokenizer_of(self), self.eos_token_ids, sharing.end_tokens)
        self.transfer = replace(self.transfer, end_token_id=end, encoded={})

    def _plan(self, sharing: Sharing, shared: SharedRound) -> Plan:
        """Return the regime's plan for this round, or for an earlier one that peers have since published."""
        view = self._with_results(sharing, self._view(sharing, shared), shared)
        self.transfer.refused.clear()
        plan = sharing.plan(view, shared, self.accelerator)
        if sharing.whiten:
            plan = whitened_plan(plan, view)
        if sharing.regime.reads_peers:
            for reason in ("too_long", "changed"):
                log_value(self, f"thl/{reason}", float(self.transfer.refused[reason]))
        return plan

    def _view(self, sharing: Sharing, shared: SharedRound) -> RoundView:
        """Return the regime's view of the round."""
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

    def _with_results(self, sharing: Sharing, view: RoundView, shared: SharedRound) -> RoundView:
        """Return the view with the results of the regime's requests: passages scored by this policy, responses by its
        rewards. Asked until it requests nothing new, at most `PHASES` times; every rank makes the same passes."""
        if not sharing.requests_anything:
            return view
        sharing.link.set_phase("scoring passages")
        made: list[Requests] = []
        for _ in range(PHASES):
            requests = sharing.requests(view, self.accelerator)
            if not any(requests):
                break
            made.append(requests)
            results = results_of(self, requests, self.prompt_rows, shared.prompts)
            view = replace(view, results=view.results.merged(results))
        tokens = sum(len(ids) for requests in made for _, ids in (*requests.logprobs, *requests.nll))
        log_value(self, "plan/passages", float(sum(requests.passages for requests in made)))
        log_value(self, "plan/passage_tokens", float(tokens))
        log_value(self, "plan/texts_scored", float(sum(len(requests.rewards) for requests in made)))
        return view

    def _follow(self, sharing: Sharing, rollouts: Sequence[Rollout]) -> None:
        for name, value in sharing.follow(rollouts).items():
            log_value(self, name, value)

    def compute_loss(
        self, model: PreTrainedModel, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return TRL's loss plus that of the round's extra rows."""
        own_loss = super().compute_loss
        if self.sharing is not None and self.model.training:
            self.sharing.link.set_phase("updating")
        if self.sharing is None or not self.model.training:
            trl_loss: torch.Tensor = own_loss(model, inputs, return_outputs, num_items_in_batch)
            return trl_loss

        def own(rows: Inputs) -> torch.Tensor:
            loss: torch.Tensor = own_loss(model, rows, return_outputs, num_items_in_batch)
            self._log_ppo_kl(rows)
            return loss

        return self.extra_rows.loss(model, inputs, own)

    def _rewarded(self) -> list[Rollout]:
        """Return this rank's rollouts with only their rewards, each prompt identified by the hash of its text: a policy
        that shares nothing accepts any data."""
        scored = self._scored
        assert scored is not None
        return [
            Rollout(row_id({"prompt": example.get("prompt")}), row, reward, ended=True)
            for row, (example, reward) in enumerate(zip(scored.inputs, scored.rewards, strict=True))
        ]

    def _collect(self, sharing: Sharing, batch: Inputs) -> OwnBatch:
        """Return this rank's rollouts. Only texts to be published are decoded."""
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
        """Return the sampling policy's log-probs, shape (rows, T), if they are published: the sampling engine's, else
        TRL's from before the update, else those of a forward pass, which draws no random number."""
        if not sharing.publishes("logprobs"):
            return None
        # TRL masks truncated rows before its passes: its log-probs of them are unusable as a trace.
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
        if old is None:  # the policy is unchanged since sampling
            log_value(self, "ppo_kl", 0.0)
            return
        sums = torch.stack([((old - self.last_logps) * mask).sum(), mask.sum().to(old.dtype)])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        log_value(self, "ppo_kl", total / max(count, 1.0))

    # ---- checkpoints

    def save_step(self, write: Callable[[], None], directory: str) -> None:
        """Write transformers' checkpoint and our state; a checkpointer makes it atomic."""
        if self.sharing is not None:
            self.sharing.link.set_phase("saving")
        if self.checkpointer is not None:
            self.checkpointer.save(self, write)
            return
        write()
        save_state(self, Path(directory) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def save_as_of_step_end(self) -> None:
        """Save a checkpoint of the last finished step after a new round has started: the weights are unchanged, and the
        generators and the token count are reset to their state at the end of that step."""
        set_random_state(self.at_step_end.random)
        self.state.num_input_tokens_seen = self.at_step_end.tokens
        self.save_now()

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write TRL's model card, unless there is a checkpointer."""
        if self.checkpointer is None:
            super().create_model_card(*args, **kwargs)

    def on_saved(self, directory: str) -> None:
        """Delete the arguments' pickle if there is a checkpointer: it is unused; recipe.yaml has every setting."""
        if self.checkpointer is not None:
            (Path(directory) / TRAINING_ARGS_NAME).unlink()

    def on_load(self, checkpoint: str) -> None:
        """Restore our state from a checkpoint."""
        load_state(self, checkpoint)

    def on_start(self) -> None:
        """Claim the policy as a new attempt if a script resumes."""
        if self.sharing is not None:
            self.sharing.claim_attempt(self.accelerator)


def _require_loadable(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError if the model that TRL is to load by its path lacks weights: it would train random ones."""
    model, args = arguments.get("model"), arguments.get("args")
    if not isinstance(model, str) or is_embedded(model):
        return
    loading = getattr(args, "model_init_kwargs", None) or {}
    trusted = bool(loading.get("trust_remote_code", getattr(args, "trust_remote_code", False)))
    if Path(model).is_dir():
        require_no_adapter(Path(model))
    require_loadable(model, loading.get("revision"), trust_remote_code=trusted)


def _prompt_text(example: Inputs) -> str:
    prompt = example["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
