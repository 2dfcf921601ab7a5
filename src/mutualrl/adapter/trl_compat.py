"""Uses of private members of TRL, transformers and accelerate; those for tools are in `trl_tools`, those of torch for
FSDP2 in `fsdp2`.

Checked against trl 1.16, transformers 5.17, accelerate 1.15. `ASSUMPTIONS` lists each member, our assumption and the
test that fails when it breaks; a test checks that all members exist and that no other module uses a private one.
`HookedGRPOTrainer` calls public hooks from the trainer's private methods; the functions below read and restore state.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers.trainer import SCHEDULER_NAME
from trl import GRPOTrainer
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler

from mutualrl.adapter import fsdp2
from mutualrl.tasks.trajectories import of_completion
from mutualrl.trajectory import Message, Trajectory, as_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R")
Inputs = dict[str, Any]
Tool = Callable[..., Any]


class Assumption(NamedTuple):
    """Private member, our assumption about it, and the test that fails when the assumption breaks."""

    member: str
    meaning: str
    test: str


_TRAINER = "tests/training/test_trainer.py"
_REGIMES = "tests/training/test_regimes_in_training.py"
_RESUME = "tests/training/test_script_resume.py"
_RANKS = "tests/training/test_ranks.py"
_RESUMED = "tests/faults/test_resume.py"
_VLLM = "tests/training/test_vllm.py"
_TURNS = "tests/training/test_environments.py"
_AGENTS = "tests/training/test_agents.py"
_REPLAYS = "tests/training/test_trajectory_rows.py"

ASSUMPTIONS = (
    Assumption("GRPOTrainer._step", "counts micro-batches of training", _REGIMES),
    Assumption("GRPOTrainer._buffered_inputs", "the slices of the current generation batch, dicts of tensors", _RESUME),
    Assumption("GRPOTrainer._metrics", '["train"] is a defaultdict of lists whose means are logged', _TRAINER),
    Assumption("GRPOTrainer._logs", "deques with one entry per completion of the generation batch", _TRAINER),
    Assumption("GRPOTrainer._tokenizer", "the tokenizer, also with a separate processor", _TRAINER),
    Assumption("GRPOTrainer._environment_pool", "lists of instances, by the environment's name", _TURNS),
    Assumption("GRPOTrainer._batch_environments", "the environment's name of each row of the batch", _AGENTS),
    Assumption("GRPOTrainer._env_tools", "the tools of each environment, by its name", _AGENTS),
    Assumption("GRPOTrainer._standalone_tools", "the tools that are no methods of an environment", _REPLAYS),
    Assumption("GRPOTrainer._sync_tool_dicts", "the tools of each row of the batch, by name", _AGENTS),
    Assumption("GRPOTrainer._async_tool_dicts", "the asynchronous ones", _AGENTS),
    Assumption("GRPOTrainer._tool_call_loop", "calls the tools of these two, and nothing else", _AGENTS),
    Assumption("GRPOTrainer._last_loaded_step", "the step whose weights the vLLM engine has", _VLLM),
    Assumption("GRPOTrainer._entropy_bonus_enabled", "whether _compute_loss adds an entropy term", _REGIMES),
    Assumption("GRPOTrainer._calculate_rewards", "rewards gathered over ranks, (rows, functions)", _TRAINER),
    Assumption("GRPOTrainer._generate_and_score_completions", "the generation batch, a dict of tensors", _TRAINER),
    Assumption("GRPOTrainer._compute_loss", "the loss of one micro-batch, divided for accumulation", _REGIMES),
    Assumption("GRPOTrainer._get_per_token_logps_and_entropies", "log-probs (rows, keep) come first", _TRAINER),
    Assumption("GRPOTrainer._log_completion_extra", "passed to reward functions as log_extra", _REGIMES),
    Assumption("GRPOTrainer._log_metric", "passed to reward functions as log_metric", _REGIMES),
    Assumption("GRPOTrainer._generate_single_turn", "samples one completion per prompt passed", _REGIMES),
    Assumption("GRPOTrainer._generate", "the third result is the completion mask; None: nothing is masked", _REGIMES),
    Assumption("GRPOTrainer._tokenize_prompts", "token ids of prompts come first", _REGIMES),
    Assumption("GRPOTrainer._get_train_sampler", "a RepeatSampler with shuffle, num_samples, generator", _RESUME),
    Assumption("GRPOTrainer._save_checkpoint", "writes checkpoint-STEP below output_dir", _RESUME),
    Assumption("GRPOTrainer._save", "writes the model, and the arguments as a pickle", _RESUME),
    Assumption("GRPOTrainer._get_output_dir", "the checkpoint directory of a trial", _RESUME),
    Assumption("GRPOTrainer._load_optimizer_and_scheduler", "called with the resumed checkpoint", _RESUME),
    Assumption("GRPOTrainer._save_optimizer_and_scheduler", "writes what is not the model's weights", _RESUMED),
    Assumption("GRPOTrainer._load_from_checkpoint", "reads the weights, before the optimizer's state", _RESUMED),
    Assumption("GRPOTrainer._init_training_state", "returns finished epochs and micro-batches to skip", _RESUME),
    Assumption("GradientState._set_sync_gradients", "sets whether this backward synchronises", _RANKS),
    Assumption("PreTrainedConfig._name_or_path", "the name or path loaded", "tests/training/test_lora.py"),
    Assumption("PartialState._prepare_backend", "selects the backend; NO without an accelerator", _RANKS),
    Assumption("PartialState._shared_state", "the state that all instances share", _RANKS),
    Assumption("VLLMGeneration._dist", "fsdp_version None: the weights are read as plain tensors", _VLLM),
    Assumption("FSDPModule._get_fsdp_state", "the state of a sharded module", _RANKS),
    Assumption("FSDPState._fsdp_param_groups", "its groups; post_forward_mesh_info None keeps them whole", _RANKS),
    Assumption("FSDPState._auto_reshard_after_forward", "whether the first forward decides it for a root", _RANKS),
)


class Replay(NamedTuple):
    """Turns of a peer's run that a rollout began with, called again in its environment: messages, none of them sampled;
    token ids between the prompt's and the completion's. `diverged`: a result was not the run's, and ended it;
    `too_long`: there was no room for it, and the rollout began without."""

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    diverged: bool = False
    too_long: bool = False


class Turns(NamedTuple):
    """What a row of a batch has with tools: its prompt, with an environment's observation; its run; which tokens of
    its completion were sampled, each 0 or 1; the name of its environment, None for the only one. `replay`: with what it
    began, whose messages are the first, and whose tokens are not in the completion."""

    prompt: Any
    run: Trajectory
    mask: list[int]
    environment: str | None = None
    replay: Replay = Replay()


class GenerationBatch(NamedTuple):
    """This rank's data rows and completions of a generation batch, and all ranks' rewards, shape (rows, functions).

    `indices`: of this rank's rows, the number of a rollout among those of its prompt; None: its place in the group.
    `dropped`: what the round has sampled beside it. `turns`: with tools, those of each row."""

    inputs: list[Inputs]
    completion_ids: list[list[int]]
    rewards: torch.Tensor
    indices: list[int] | None = None
    dropped: tuple[Dropped, ...] = ()
    turns: Sequence[Turns] = ()

    def written(self, row: int, decode: Callable[[Sequence[int]], str]) -> tuple[Trajectory, tuple[bool, ...] | None]:
        """Return what a row wrote, and which tokens of its completion were sampled (None: all). `decode`: of a text."""
        if not self.turns:
            return Trajectory.of_text(decode(self.completion_ids[row])), None
        return self.turns[row].run, tuple(map(bool, self.turns[row].mask))

    def begun_with(self, row: int) -> Sequence[int]:
        """Return the tokens of the replayed turns with which a row began; none for any other."""
        return self.turns[row].replay.ids if self.turns else ()


class Dropped(NamedTuple):
    """Batch of which the round does not train on some groups: `rows`, of this rank."""

    batch: Inputs
    generation: GenerationBatch
    rows: list[int]


class ScoredBatch(NamedTuple):
    """Generation batch as TRL makes it, with what it was made of, and TRL's table of completions."""

    batch: Inputs
    generation: GenerationBatch
    logged: dict[str, list[object]]


class HookedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL and transformers are followed as Any
    """GRPOTrainer with public hooks, called from its private methods. The default hooks leave GRPOTrainer unchanged."""

    last_logps: torch.Tensor  # of the last forward; TRL's loss does not return them
    _sampler: Any = None  # None for iterable data, or if a subclass overrides the sampler

    _pending: GenerationBatch | None = None  # scored, until TRL has computed its advantages
    _generated: tuple[list[Any], list[list[int]] | None] = ([], None)  # the prompts of the last batch, and masks
    _replayed: list[Replay] | None = None  # of the last batch
    _beginnings: list[Replay] | None = None  # while it is sampled

    def compute_rewards(self, score: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Hook: return the rewards that `score()` computes with TRL's reward functions."""
        return score()

    #: prefixes of the rows being sampled; None if no row of any rank has one
    prefixes: list[tuple[int, ...]] | None = None
    #: what the model is shown in place of the prompts, which have an environment's observation; None: the prompts
    shown: Callable[[list[Any]], list[Any]] | None = None

    def replayed(self, prompts: list[Any]) -> list[Replay] | None:
        """Hook: return with which replayed turns each rollout begins, after the environments were reset and before it
        is sampled; None if no row of any rank has some."""
        return None

    def calling(self, tool: str) -> AbstractContextManager[None]:
        """Hook: the context of a call of a tool."""
        return nullcontext()

    def on_generate(self, inputs: list[Inputs]) -> None:
        """Hook: called before TRL samples a generation batch; may set `prefixes`, the first tokens of completions."""

    def make_round(self, inputs: list[Inputs]) -> tuple[Inputs, GenerationBatch]:
        """Hook: return the batch to train on. `sample_batch` samples one; all ranks call it equally often."""
        sampled = self.sample_batch(inputs)
        return sampled.batch, sampled.generation

    def on_generated(self, batch: Inputs, generation: GenerationBatch) -> None:
        """Hook: receive the generation batch that TRL has sampled and scored; may change `batch` in place."""

    def save_step(self, write: Any, directory: str) -> None:
        """Hook: save the checkpoint of the current step; `write()` is transformers' own saving, into `directory`."""
        write()

    def on_saved(self, directory: str) -> None:
        """Hook: called after the model was written into `directory`."""

    def on_load(self, checkpoint: str) -> None:
        """Hook: called after optimizer and scheduler were loaded from a checkpoint."""

    def on_start(self) -> None:
        """Hook: called when training starts, after the checkpoint was loaded."""

    # ---- overrides of TRL and transformers

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        score = super()._calculate_rewards
        turns = self._turns_of(completions) if self.tools else []  # first: reward functions may change messages
        if turns and self._replayed is not None:  # rewards judge the whole run
            completions = [[*as_chats(row.replay.messages), *of] for row, of in zip(turns, completions, strict=True)]
        rewards = self.compute_rewards(lambda: score(inputs, prompts, completions, completion_ids_list))
        self._pending = GenerationBatch(inputs, completion_ids_list, rewards, turns=turns)
        return rewards

    def _turns_of(self, completions: Sequence[Any]) -> list[Turns]:
        prompts, masks = self._generated
        assert masks is not None
        names = self._batch_environments if self.environment_factories is not None else [None] * len(completions)
        replays = [Replay()] * len(prompts) if self._replayed is None else self._replayed
        rows = []
        for prompt, each, mask, name, replay in zip(prompts, completions, masks, names, replays, strict=True):
            rows.append(
                Turns(prompt, Trajectory.of_run((*replay.messages, *of_completion(each))), list(mask), name, replay)
            )
        return rows

    def _generate_and_score_completions(self, inputs: Any) -> Inputs:
        batch, generation = self.make_round(inputs)
        self.on_generated(batch, generation)
        return batch

    def sample_batch(self, inputs: list[Inputs]) -> ScoredBatch:
        """Return TRL's generation batch for this rank's data rows."""
        self.on_generate(inputs)
        batch: Inputs = super()._generate_and_score_completions(inputs)
        assert self._pending is not None
        generation, self._pending = self._pending, None
        return ScoredBatch(batch, generation, {name: list(column) for name, column in completion_table(self).items()})

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample completions. If `prefixes` is set, sample from each prompt with its prefix, and prepend the prefix to
        the completion. The prompts of a group then differ, as with replayed turns, so each is sampled once."""
        if self._beginnings is not None:
            num_generations = 1
        with fsdp2.readable_weights(self) if self.use_vllm else fsdp2.whole_weights(self.model):
            return self._sample_prefixed(
                super()._generate_single_turn, prompt_ids, images, fields, num_generations, *args, **kwargs
            )

    def _sample_prefixed(
        self,
        sample: Callable[..., Any],
        prompt_ids: Any,
        images: Any,
        fields: Any,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.prefixes is None:
            return sample(prompt_ids, images, fields, num_generations, *args, **kwargs)
        prefixed = [[*ids, *prefix] for ids, prefix in zip(prompt_ids, self.prefixes, strict=True)]
        sampled, logprobs = sample(prefixed, images, fields, 1, *args, **kwargs)
        limit = self.max_completion_length
        completions = [[*prefix, *ids][:limit] for prefix, ids in zip(self.prefixes, sampled, strict=True)]
        if logprobs is not None:  # zeros for the prefix, which is masked
            logprobs = [
                [*([0.0] * len(prefix)), *row][:limit] for prefix, row in zip(self.prefixes, logprobs, strict=True)
            ]
        return completions, logprobs

    def _generate(self, prompts: Any) -> Any:
        """Generate as TRL does, from what is shown; mask prefixes like tool tokens: in the context, but not trained
        on."""
        shown = prompts if self.shown is None else self.shown(prompts)
        self._replayed = self.replayed(prompts)
        with replaced(self, {"_beginnings": self._replayed}):
            prompt_ids, completion_ids, mask, *rest = super()._generate(shown)
        self._generated = prompts, mask
        if self.prefixes is not None:
            mask = [
                [0] * len(prefix) + [1] * (len(ids) - len(prefix))
                for prefix, ids in zip(self.prefixes, completion_ids, strict=True)
            ]
        return prompt_ids, completion_ids, mask, *rest

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """Tokenize as TRL does, each prompt followed by the turns that are replayed."""
        prompt_ids, *rest = super()._tokenize_prompts(prompts)
        if self._beginnings is not None:
            prompt_ids = [[*ids, *replay.ids] for ids, replay in zip(prompt_ids, self._beginnings, strict=True)]
        return prompt_ids, *rest

    def _tool_call_loop(self, *args: object, **kwargs: object) -> object:
        """Run TRL's loop with every call of a tool in its context."""
        names = ("_sync_tool_dicts", "_async_tool_dicts")
        each = [
            [{key: self._in_context(key, tool) for key, tool in row.items()} for row in vars(self)[n]] for n in names
        ]
        with replaced(self, dict(zip(names, each, strict=True))):
            return super()._tool_call_loop(*args, **kwargs)

    def _in_context(self, name: str, tool: Tool) -> Tool:
        if inspect.iscoroutinefunction(tool):

            @functools.wraps(tool)
            async def call_async(*args: object, **kwargs: object) -> object:
                with self.calling(name):
                    return await tool(*args, **kwargs)

            return call_async

        @functools.wraps(tool)
        def call(*args: object, **kwargs: object) -> object:
            with self.calling(name):
                return tool(*args, **kwargs)

        return call

    def _get_per_token_logps_and_entropies(self, *args: object, **kwargs: object) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.last_logps = result[0].detach()
        return result

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = super()._save_checkpoint
        self.save_step(lambda: save(model, trial), self._get_output_dir(trial))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        self.on_saved(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not fsdp2.is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        fsdp2.save(self, Path(output_dir))
        if self.accelerator.is_main_process:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not fsdp2.is_sharded(self.model):  # else with the optimizer's state, below
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not fsdp2.is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            fsdp2.load(self, Path(checkpoint))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        if checkpoint is not None:
            self.on_load(checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _init_training_state(self, *args: object, **kwargs: object) -> tuple[int, int]:
        """Advance TRL's sampler past the finished epochs: its generator draws one permutation per epoch. Other samplers
        are unchanged, as in TRL."""
        state: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.on_start()
        if type(self._sampler) is RepeatSampler and self._sampler.shuffle:
            for _ in range(state[0]):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)
        return state

    def save_now(self) -> None:
        """Save a checkpoint of the current step."""
        self._save_checkpoint(self.model, None)


# ---- trainer state


def tokenizer_of(trainer: GRPOTrainer) -> PreTrainedTokenizerBase:
    """Return the tokenizer that decodes completions."""
    return trainer._tokenizer


def has_trl_loss(trainer: GRPOTrainer) -> bool:
    """Return whether the loss is TRL's own, not a subclass's."""
    return getattr(trainer._compute_loss, "__func__", None) is GRPOTrainer._compute_loss


def micro_step(trainer: GRPOTrainer) -> int:
    """Return the number of micro-batches so far."""
    return int(trainer._step)


def micro_steps_per_round(trainer: GRPOTrainer) -> int:
    """Return the number of micro-batches per generation batch, over all its passes."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def round_in_use(trainer: GRPOTrainer) -> bool:
    """Return whether a generation batch is partly used up."""
    return micro_step(trainer) % micro_steps_per_round(trainer) != 0


def position_in_round(trainer: GRPOTrainer) -> tuple[int, int]:
    """Return the optimizer step within the pass over the generation batch, and the micro-batch within that step."""
    per_step = int(trainer.args.gradient_accumulation_steps)
    return divmod(micro_step(trainer) % int(trainer.args.steps_per_generation), per_step)


def mini_batch_of_round(trainer: GRPOTrainer) -> int:
    """Return the index of the optimizer step within the round, over all passes over the generation batch."""
    return micro_step(trainer) % micro_steps_per_round(trainer) // int(trainer.args.gradient_accumulation_steps)


def buffered_batches(trainer: GRPOTrainer) -> list[Inputs] | None:
    """Return the slices of the generation batch in use; None between two batches."""
    return trainer._buffered_inputs if round_in_use(trainer) else None


def restore_position(trainer: GRPOTrainer, step: int, buffered: Sequence[Mapping[str, Any]] | None) -> None:
    """Restore the number of micro-batches and the generation batch in use."""
    trainer._step = step
    if buffered is None:
        trainer._buffered_inputs = None
        return
    device = trainer.accelerator.device
    batches = []
    for batch in buffered:
        on_device = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
        }
        batches.append(on_device)
    trainer._buffered_inputs = batches


def log_value(trainer: GRPOTrainer, name: str, value: float) -> None:
    """Add a value to a metric, whose mean TRL logs with the step."""
    trainer._metrics["train"][name].append(value)


def last_value(trainer: GRPOTrainer, name: str) -> float:
    """Return the value that was added to a metric last."""
    return float(trainer._metrics["train"][name][-1])


def of_rank(trainer: GRPOTrainer, rows: Sequence[R]) -> list[R]:
    """Return this rank's part of all ranks' rows in gathered order, of which each rank has equally many."""
    per_rank = len(rows) // trainer.accelerator.num_processes
    first = trainer.accelerator.process_index * per_rank
    return list(rows[first : first + per_rank])


def replace_advantages(trainer: GRPOTrainer, batch: Inputs, advantages: Sequence[float]) -> None:
    """Replace TRL's advantages with `advantages`, of all ranks' rows, also in TRL's completions table."""
    own = batch["advantages"]
    batch["advantages"] = torch.tensor(of_rank(trainer, advantages), dtype=own.dtype, device=own.device)
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages)


def add_token_advantages(trainer: GRPOTrainer, batch: Inputs, by_row: Mapping[int, npt.NDArray[np.float32]]) -> None:
    """Add advantages per token to those of this rank's rows, which then have the shape (rows, T). `by_row`: of all
    ranks' rows, shape (tokens,). TRL's table keeps one advantage per rollout."""
    own, rows = batch["advantages"], len(batch["advantages"])
    added = torch.zeros((rows, batch["completion_ids"].size(1)), dtype=own.dtype)
    for row in range(rows):
        values = by_row.get(trainer.accelerator.process_index * rows + row)
        if values is not None:
            added[row, : len(values)] = torch.from_numpy(values)
    batch["advantages"] = own[:, None] + added.to(own.device)


def replace_completion_table(trainer: GRPOTrainer, columns: Mapping[str, Sequence[object]]) -> None:
    """Replace the rows in TRL's table of completions, whose columns are of one length: a column of the user's
    (`log_extra`) that is not given is removed."""
    for name, column in completion_table(trainer).items():
        column.clear()
        column.extend(columns.get(name, ()))
        if not column and name.startswith("extra/"):
            del trainer._logs["extra"][name.removeprefix("extra/")]
    for name in columns.keys() - completion_table(trainer).keys():
        trainer._logs["extra"][name.removeprefix("extra/")].extend(columns[name])


def completion_table(trainer: GRPOTrainer) -> dict[str, deque[object]]:
    """Return the columns of TRL's table of completions: of the last generation batch, in gathered order."""
    logs = trainer._logs
    named = {f"{kind}/{name}": column for kind in ("rewards", "extra") for name, column in logs[kind].items()}
    return {"prompt": logs["prompt"], "completion": logs["completion"], "advantages": logs["advantages"], **named}


@contextmanager
def replaced(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Temporarily set instance attributes of an object; attributes that the instance did not have are deleted again."""
    saved = {name: vars(target)[name] for name in values if name in vars(target)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in saved:
                setattr(target, name, saved[name])
            else:
                delattr(target, name)


def reward_rows(
    trainer: GRPOTrainer, inputs: list[Inputs], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return TRL's rewards of texts for data rows, gathered over ranks, shape (rows, functions)."""
    prompts = [row["prompt"] for row in inputs]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return reward_completions(trainer, inputs, prompts, completions, ids)


def reward_completions(
    trainer: GRPOTrainer,
    inputs: list[Inputs],
    prompts: list[Any],
    completions: list[Any],
    ids: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Return the same of completions as TRL has them, texts or messages."""
    no_logging = {"_log_completion_extra": lambda *_: None, "_log_metric": lambda *_: None}
    with replaced(trainer, no_logging):
        rewards: torch.Tensor = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, completions, list(ids))
    return rewards


def total_rewards(trainer: GRPOTrainer, rewards: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over reward functions, shape (rows,); NaN (unscorable) where all functions return NaN or
    the sum is infinite: TRL trains on an infinite reward, but peers must not."""
    total: torch.Tensor = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1)
    total[torch.isnan(rewards).all(dim=1) | total.isinf()] = torch.nan
    return total


# ---- forward and backward passes


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Temporarily set a model to evaluation mode: without dropout, a pass draws no random number."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def token_logps(
    trainer: GRPOTrainer, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, batch_size: int | None = None
) -> torch.Tensor:
    """Return log-probs of the last `keep` tokens at the sampling temperature, shape (rows, keep)."""
    sizes = {} if batch_size is None else {"batch_size": batch_size}
    logps: torch.Tensor = trainer._get_per_token_logps_and_entropies(model, ids, mask, keep, **sizes)[0]
    return logps


def policy_loss(trainer: GRPOTrainer, model: Any, inputs: Inputs) -> torch.Tensor:
    """Return TRL's loss of a micro-batch."""
    loss: torch.Tensor = trainer._compute_loss(model, inputs)
    return loss


@contextmanager
def surrogate_only(trainer: GRPOTrainer, delta: float) -> Iterator[None]:
    """Temporarily reduce `policy_loss` to the two-sided surrogate: no KL, entropy or router term, no metrics. `delta`:
    its dual clip."""
    disabled = {
        "beta": 0.0,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "_metrics": {**trainer._metrics, "train": defaultdict(list)},
    }
    with replaced(trainer, disabled), replaced(trainer.args, {"delta": delta}):
        yield


@contextmanager
def no_grad_sync(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Run forward and backward without synchronising gradients, as in all micro-batches of a step but the last.

    Under FSDP2 they are reduced in each pass: unreduced, every rank would keep whole ones.
    """
    if fsdp2.is_sharded(model):
        yield
        return
    state, before = accelerator.gradient_state, accelerator.sync_gradients
    state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(before)


def backward(accelerator: Accelerator, loss: torch.Tensor) -> None:
    """Run the backward pass of a loss that is already divided for accumulation."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))


# ---- engines, models and devices


def loaded_from(config: Any) -> str:
    """Return the name or path from which the model of a configuration was loaded."""
    return str(config._name_or_path)


@contextmanager
def whole_model(trainer: GRPOTrainer) -> Iterator[Any]:
    """Yield the model without wrappers, with its whole weights on every rank, as for TRL's sampling."""
    gather = trainer.args.ds3_gather_for_generation
    with (
        fsdp2.whole_weights(trainer.model),
        unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather
        ) as model,
    ):
        yield model


def load_weights_into_engine(trainer: GRPOTrainer) -> None:
    """Load the current weights into the vLLM engine, unless it has them."""
    if trainer.state.global_step != trainer._last_loaded_step:
        with fsdp2.readable_weights(trainer):
            trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def allow_zero_on_cpu() -> None:
    """Make accelerate start DeepSpeed over gloo on CPU. Must precede GRPOConfig.

    accelerate 1.15 silently disables DeepSpeed without an accelerator, and trains without it. This affects only
    processes that torch.distributed.run started and that request DeepSpeed.
    """
    original = PartialState._prepare_backend
    if getattr(original, "zero_on_cpu", False):
        return

    def prepare(self: PartialState, *args: object, **kwargs: object) -> tuple[str | None, DistributedType]:
        backend_name, kind = original(self, *args, **kwargs)
        requested = "LOCAL_RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        return ("gloo", DistributedType.MULTI_CPU) if kind == DistributedType.NO and requested else (backend_name, kind)

    prepare.zero_on_cpu = True  # type: ignore[attr-defined]
    PartialState._prepare_backend = prepare
