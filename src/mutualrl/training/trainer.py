"""TRL's GRPOTrainer with an exchange. Without one it equals GRPOTrainer: same arguments, same results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from trl import GRPOTrainer

from mutualrl.adapter.trl_compat import (
    GenerationBatch,
    HookedGRPOTrainer,
    Inputs,
    Replay,
    buffered_batches,
    log_value,
    micro_step,
    restore_position,
    tokenizer_of,
)
from mutualrl.adapter.trl_tools import has_turns
from mutualrl.console.lines import notify
from mutualrl.engines.generation_defaults import neutralize
from mutualrl.engines.model_files import require_loadable, require_no_adapter
from mutualrl.errors import RewardError, UsageError
from mutualrl.regimes.resample import Resample
from mutualrl.regimes.run_problems import RunFacts, setting_problems, turns_problems
from mutualrl.see.liveness import Phase
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.rewards import adapt, distinct_names
from mutualrl.thl.table import table_of
from mutualrl.tiny import is_embedded
from mutualrl.training.callback import MetricsCallback, SharingCallback
from mutualrl.training.checkpointing import Checkpointer
from mutualrl.training.extra_rows import ExtraRows
from mutualrl.training.random_state import StepEnd, random_state, set_random_state
from mutualrl.training.resampling import resampled_round, resampling_problems
from mutualrl.training.round import Rounds
from mutualrl.training.sampled_text import require_sampled_text
from mutualrl.training.samples import sampling_problems
from mutualrl.training.script_callback import ScriptRunCallback
from mutualrl.training.sharing import Sharing
from mutualrl.training.state import read_state, write_state
from mutualrl.training.tool_metrics import tool_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MutualGRPOTrainer(HookedGRPOTrainer):
    """GRPOTrainer whose rounds are shared with peers. See GRPOTrainer for all other arguments.

    Args:
        sharing: the exchange, peers and regime; None trains alone, exactly as GRPOTrainer does.
        checkpointer: writes complete checkpoints in a run's directory; None uses transformers' own. Either way a
            checkpoint has the generation batch in use, which TRL's lacks, so that a resumed run continues bit for bit.
        resample: drop groups whose rewards are all equal, and sample further prompts (dynamic sampling); needs neither
            a sharing nor peers.

    Raises UsageError for settings under which a regime would compute wrong numbers: `steps_per_generation` that is not
    a multiple of `gradient_accumulation_steps` (means over the optimizer step would not be exact), a truncated sampling
    distribution in the denominator of an importance ratio, or rewards that are normalized before they are summed.
    """

    def __init__(
        self,
        *args: object,
        sharing: Sharing | None = None,
        checkpointer: Checkpointer | None = None,
        resample: Resample | None = None,
        **kwargs: object,
    ) -> None:
        if sharing is not None:  # checked before the model is built
            arguments = inspect.signature(GRPOTrainer).bind_partial(*args, **kwargs).arguments
            turns = bool(arguments.get("tools")) or arguments.get("environment_factory") is not None
            if unfit := turns_problems(sharing.regime, turns=turns):
                raise UsageError("; ".join(f"{key.replace('turns', 'tools')}: {problem}" for key, problem in unfit))
            if sharing.publishes("text"):
                require_sampled_text(arguments, sharing.publisher_of("text"))
            _require_loadable(arguments)
        super().__init__(*args, **kwargs)
        self._called: list[str] = []  # tools that are running
        self._of_batch: list[Inputs] = []  # data rows that are sampled
        self.sharing = sharing
        self.checkpointer = checkpointer
        self.resample = resample
        self.at_step_end = StepEnd(random_state(), 0)
        self.rounds: Rounds | None = None
        self.declared_generation = self.model.generation_config
        self.extra_rows = ExtraRows(self, None if sharing is None else sharing.regime.row_metrics)
        if resample is not None and (problems := resampling_problems(self)):
            raise UsageError("resample: " + "; ".join(problems))
        if sharing is None:
            return
        self.declared_generation = neutralize(self.model)
        self._require_tokenizers(sharing)
        self.rounds = Rounds.of(self, sharing, self.extra_rows)
        if sharing.script is not None:  # the command makes unique ids
            self.rounds.prompt_rows.require_unique()
        if sharing.script is not None:
            self.add_callback(ScriptRunCallback(sharing, sharing.script, lambda: self.reward_func_names, resample))
            self.add_callback(MetricsCallback(sharing.script.member.files.metrics))
        self.add_callback(SharingCallback(sharing.link, sharing.background))
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
        settings = dict(vars(args))
        facts = RunFacts(
            trainer=settings,
            traced=sharing.traced,
            whiten=sharing.whiten,
            staleness=sharing.link.staleness,
            turns=has_turns(self),
            resample=self.resample is not None,
        )
        by_key = setting_problems(regime, facts)
        problems = [f"{key.removeprefix('trainer.')}: {problem}" for key, problem in by_key]
        problems += self._dropout_problem(sharing)
        problems += sampling_problems(self) if regime.needs().samples else []
        if regime.needs().peers and args.steps_per_generation % args.gradient_accumulation_steps:
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
        self.prefixes, self._of_batch = None, inputs
        if self.rounds is not None and self.model.training:
            self.rounds.sharing.link.set_phase(Phase.GENERATING)
            self.prefixes = self.rounds.guides.prefixes(inputs)

    def replayed(self, prompts: list[Any]) -> list[Replay] | None:
        """Act the turns again with which the rollouts begin, if the regime has any."""
        if self.rounds is None or not self.model.training:
            return None
        return self.rounds.guides.replays(self._of_batch, prompts)

    def make_round(self, inputs: list[Inputs]) -> tuple[Inputs, GenerationBatch]:
        """Sample a round; with `resample`, until the rewards of every group differ or the attempts are spent."""
        if self.resample is None or not self.model.training:
            return super().make_round(inputs)
        return resampled_round(self, self.resample, inputs)

    @contextmanager
    def calling(self, tool: str) -> Iterator[None]:
        """Set the phase to the called tool: it may hang."""
        if self.sharing is None:
            yield
            return
        self._called.append(tool)
        self.sharing.link.set_phase(f"{Phase.CALLING} tool {tool}")
        try:
            yield
        finally:
            self._called.remove(tool)  # asynchronous ones run beside each other
            still = self._called[-1:]
            self.sharing.link.set_phase(f"{Phase.CALLING} tool {still[0]}" if still else Phase.GENERATING)

    def _on_reward(self, name: str) -> None:
        """Set the phase to the running reward function: it may hang, or end the process."""
        if self.sharing is not None:
            self.sharing.link.set_phase(f"{Phase.SCORING}: reward function {name}", at_once=True)

    def _on_reward_returned(self) -> None:
        """Set the phase back: what ends the process from here on is not the reward function."""
        if self.sharing is not None:
            self.sharing.link.set_phase(Phase.SCORING, at_once=True)

    def compute_rewards(self, score: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Score with TRL's reward functions. Raises RewardError naming them if the result is not a reward."""
        if self.sharing is None:
            return score()
        self.sharing.link.set_phase(Phase.SCORING)
        names = ", ".join(self.reward_func_names)
        try:
            return score()
        except (TypeError, ValueError) as error:  # raised by TRL for an invalid return value
            raise RewardError(f"reward function {names}: {type(error).__name__}: {error}") from error

    def on_generated(self, batch: Inputs, generation: GenerationBatch) -> None:
        """Share the round after TRL has sampled and scored it."""
        if self.rounds is None or not self.model.training:
            return
        log_value(self, "rewards/unscorable", float(self.rounds.unscorable(generation)))
        if self.tools:
            for name, metric in tool_metrics(self, generation, self.rounds.schemas_of).items():
                log_value(self, name, metric)
        if self.rounds.sharing.whiten:
            self.rounds.whiten(batch, generation)
        if self.rounds.sharing.active:
            self.rounds.run(batch, generation)
        else:
            self.rounds.follow(generation)

    def compute_loss(
        self, model: PreTrainedModel, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return TRL's loss plus that of the round's extra rows."""
        own_loss = super().compute_loss
        if self.sharing is not None and self.model.training:
            self.sharing.link.set_phase(Phase.UPDATING)
        if self.sharing is None or not self.model.training:
            trl_loss: torch.Tensor = own_loss(model, inputs, return_outputs, num_items_in_batch)
            return trl_loss

        def own(rows: Inputs) -> torch.Tensor:
            loss: torch.Tensor = own_loss(model, rows, return_outputs, num_items_in_batch)
            self._log_ppo_kl(rows)
            return loss

        return self.extra_rows.loss(model, inputs, own)

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

        def write_into(target: Path) -> None:
            write()
            write_state(target, self.accelerator.process_index, self.packed())

        if self.sharing is not None:
            self.sharing.link.set_phase(Phase.SAVING)
        if self.checkpointer is not None:
            self.checkpointer.save(self, write_into)
        else:
            write_into(Path(directory) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def packed(self) -> JsonObject:
        """Return the state beyond transformers': TRL's micro-batch count and buffered batch, what the policy remembers,
        the extra rows of the round in use."""
        state: JsonObject = {"step": micro_step(self), "buffered": buffered_batches(self)}
        return state if self.sharing is None else {**state, **self.sharing.packed(), **self.extra_rows.packed()}

    def on_load(self, checkpoint: str) -> None:
        """Restore our state from a checkpoint."""
        state = read_state(checkpoint, self.accelerator.process_index)
        if state is None:
            return
        restore_position(self, state["step"], state["buffered"])
        if self.sharing is not None and "regime_state" in state:
            self.sharing.restore(state)
            self.extra_rows.unpack(state)

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

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as TRL does. A script that resumes before its first checkpoint was saved starts at step 0: the rounds
        that it has published are the same."""
        directory = self.args.output_dir
        resumes = resume_from_checkpoint is True and self.sharing is not None and self.sharing.resume
        if resumes and (not Path(directory).is_dir() or get_last_checkpoint(directory) is None):
            notify(f"there is no checkpoint in {directory} yet: training starts at step 0")
            resume_from_checkpoint = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

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
    with _without_zero3(args):
        require_loadable(model, loading.get("revision"), trust_remote_code=trusted)


@contextmanager
def _without_zero3(args: Any) -> Iterator[None]:
    """Suspend the ZeRO-3 settings of these arguments, under which transformers refuses the meta device."""
    config = getattr(args, "hf_deepspeed_config", None)
    if config is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)
