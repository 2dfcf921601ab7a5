"""Construction of one policy's trainer from a run directory. Importing this module imports TRL, which takes seconds."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import PrinterCallback, set_seed
from transformers.utils import logging
from trl.chat_template_utils import add_response_schema, supports_tool_calling

from mutualrl.adapter.data import as_dataset
from mutualrl.console.lines import notify
from mutualrl.engines.scoring import check_vocabulary
from mutualrl.errors import ModelError
from mutualrl.recipes import Recipe
from mutualrl.recipes.agreement import (
    FittingPrompts,
    all_prompts,
    compare,
    fingerprint,
    fitting_prompts,
    require_enough,
    validation_sample,
)
from mutualrl.recipes.batch_plan import plan_batch
from mutualrl.recipes.pool_tokenizers import load_source_tokenizers, load_tokenizers
from mutualrl.recipes.run_sources import read, recorded_digests
from mutualrl.recipes.trainer_table import Settings, defaults
from mutualrl.records import columns_of
from mutualrl.regimes.regime import publish_schema
from mutualrl.seeds import policy_seed
from mutualrl.tasks.prompting import prompt_ids
from mutualrl.tasks.rewards import load_rewards, require_columns
from mutualrl.tasks.section import TaskSection
from mutualrl.tasks.turns import load_environment, load_tools, visible_tools
from mutualrl.tiny import resolve_path
from mutualrl.training.config import grpo_config
from mutualrl.training.member import PlannedMember
from mutualrl.training.rescues import RescueLog
from mutualrl.training.safe_deepspeed import enforce_weights_only_load
from mutualrl.training.sample_log import SampleLog
from mutualrl.training.sharing import Sharing
from mutualrl.training.source_rounds import SourceRounds
from mutualrl.training.trackers import tracker_keys
from mutualrl.training.trainer import MutualGRPOTrainer
from mutualrl.training.vllm_generation import engine_turn, on_engine_step, prepare_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_trainer(member: PlannedMember) -> tuple[MutualGRPOTrainer, Sharing, FittingPrompts]:
    """Return one policy's trainer, built after checking that its fingerprint matches the run's, its sharing, and the
    prompts that fit every policy."""
    logging.disable_progress_bar()
    policy, run, info, recipe, exchange = member.name, member.run, member.info, member.recipe, member.exchange
    allocation = info.placement[policy]
    batch = plan_batch(recipe, policy, allocation.processes)
    prompts, validation = all_prompts(recipe, "train"), all_prompts(recipe, "validation")
    digests = recorded_digests(info, recipe)
    plan = fingerprint(recipe, batch, prompts, validation_sample(recipe, validation), digests)
    compare(policy, plan, info.fingerprint)
    tokenizers = load_tokenizers(recipe)
    room = recipe.trainer_settings(policy).get("max_completion_length") or defaults()["max_completion_length"]
    turns = _turns(recipe.task, policy, tokenizers[policy], int(room))
    tools = {"tools": visible_tools(turns["tools"], turns.get("environment_factory"))} if turns else {}
    fitting = fitting_prompts(recipe, prompts, validation, tokenizers, tools)
    prompts = fitting.training
    require_enough(prompts, batch.prompts)
    cpu = not torch.cuda.is_available() or not allocation.gpus
    args = grpo_config(
        recipe,
        replace(allocation, batch=batch),
        member.files.root / "trainer",
        cpu=cpu,
        trackers=tracker_keys(recipe, run, policy),
    )
    if allocation.sharding.stage is not None:
        enforce_weights_only_load()
    prepare_vllm(recipe.trainer_settings(policy), cpu=cpu)
    regimes = [recipe.regime_of(p.name) for p in recipe.policies]
    sources = recipe.sources_of(policy)
    recorded = [source.name for source in sources if not source.asked]
    asked = {source.name: source.traits for source in sources if source.asked}
    sharing = Sharing(
        link=member.link(
            [p.name for p in recipe.policies if p.name != policy], asked=asked, staleness=recipe.exchange.staleness
        ),
        regime=recipe.regime_of(policy),
        schema=publish_schema(regimes, recipe.run.publish),
        run_seed=recipe.run.seed,
        max_length=args.max_completion_length,
        tokenizers={**tokenizers, **load_source_tokenizers(recipe)},
        sources=[SourceRounds.of(read(run, name), exchange) for name in recorded],
        asked=asked,
        rescues=RescueLog(member.files.rescues),
        samples=SampleLog(member.files.samples),
        whiten=recipe.round.whiten_advantages,
    )
    model = resolve_path(recipe.policy(policy).model)
    lora = recipe.lora_settings(policy)
    start_in_turn = engine_turn(
        recipe.trainer_settings(policy),
        run.root / "supervisor" / "engines.lock",
        shared=allocation.policies_per_gpu > 1,
        say=notify,
    )
    rewards = load_rewards(recipe.task.reward)
    require_columns(rewards, columns_of(prompts))
    try:
        with start_in_turn:
            trainer = MutualGRPOTrainer(
                model=model,
                reward_funcs=rewards or None,
                args=args,
                train_dataset=as_dataset(prompts, tokenizers[policy]),
                processing_class=tokenizers[policy],
                peft_config=None if lora is None else lora.for_peft(),
                sharing=sharing,
                resample=recipe.round.resample,
                **turns,
            )
    except (OSError, SafetensorError) as error:
        raise ModelError(f"policy {policy!r}: the model {model!r} cannot be loaded: {error}") from error
    rows = prompt_ids([p.content for p in prompts], tokenizers[policy], trainer.chat_template_kwargs)
    check_vocabulary(trainer.model, max(max(row) for row in rows))
    _warn_context_length(policy, trainer, max(map(len, rows)))
    on_engine_step(trainer, sharing.link.advance)
    trainer.remove_callback(PrinterCallback)  # metrics.jsonl has every step
    return trainer, sharing, fitting


def _warn_context_length(policy: str, trainer: MutualGRPOTrainer, longest: int) -> None:
    """Warn if prompt and completion together may exceed the model's context."""
    context = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    completion = trainer.args.max_completion_length
    if isinstance(context, int) and longest + completion > context:
        notify(
            f"policy {policy!r}: a prompt of {longest} tokens and trainer.max_completion_length ({completion}) exceed "
            f"the {context} positions of its model, which was not pre-trained on positions beyond them"
        )


def _turns(task: TaskSection, policy: str, tokenizer: PreTrainedTokenizerBase, room: int) -> Settings:
    """Return TRL's arguments for multi-turn rollouts of at most `room` tokens; none for a task without tools and
    environment."""
    if not task.has_turns:
        return {}
    _require_tool_calling(policy, tokenizer)
    turns: Settings = {"tools": load_tools(task.tools, room)}
    if task.environment is not None:
        turns["environment_factory"] = load_environment(task.environment, owns_reward=not task.reward, room=room)
    return turns


def _require_tool_calling(policy: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ModelError if a policy's chat template cannot write tool calls, or TRL cannot parse them."""
    if not tokenizer.chat_template:
        problem = "has no chat template"
    elif not supports_tool_calling(tokenizer):
        problem = "has a chat template that cannot write tool calls"
    elif (parse_error := _tool_call_parse_error(tokenizer)) is not None:
        problem = f"has a chat template whose tool calls TRL cannot parse ({parse_error})"
    else:
        return
    raise ModelError(
        f"policy {policy!r}: its tokenizer {problem}, which task.tools and task.environment require; expected a "
        "model that calls tools, such as Qwen/Qwen3-0.6B"
    )


def _tool_call_parse_error(tokenizer: PreTrainedTokenizerBase) -> str | None:
    if any(getattr(tokenizer, key, None) is not None for key in ("response_template", "response_schema")):
        return None
    try:
        add_response_schema(copy.deepcopy(tokenizer))
    except ValueError as error:
        return str(error).splitlines()[0]
    return None


def seed_policy(recipe: Recipe, policy: str, rank: int) -> None:
    """Seed this policy's sampling. Must follow the trainer's construction, which seeds all policies alike."""
    trainer = recipe.trainer_settings(policy)
    if trainer.get("use_vllm"):  # ranks that share a vLLM engine must sample the same tokens
        rank //= int(trainer.get("vllm_tensor_parallel_size", 1))
    set_seed(policy_seed(recipe.run.seed, policy, rank))
