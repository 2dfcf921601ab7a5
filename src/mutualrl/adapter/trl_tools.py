"""Rollouts with tools and environments: all that needs private members of TRL for them (see `trl_compat`)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.utils import get_json_schema
from trl import GRPOTrainer

from mutualrl.adapter.trl_compat import GenerationBatch, HookedGRPOTrainer, Inputs, replaced
from mutualrl.engines.sampling import Sampling

Environments = dict[Any, list[Any]]  # instances by name


def greedy_decoding(trainer: GRPOTrainer, sampling: Sampling | None = None) -> Inputs:
    """Return the attributes with which TRL decodes greedily with transformers, without the sampling settings of
    training; none for a `sampling` at a temperature."""
    if sampling is not None and sampling.temperature:
        return {}
    config = trainer.generation_config
    plain = GenerationConfig(
        max_new_tokens=trainer.max_completion_length,
        do_sample=False,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    return {"generation_config": plain, "generation_kwargs": {}}


def prompt_tokens(trainer: GRPOTrainer, prompt: Any, environment: str | None = None) -> tuple[int, ...]:
    """Return the token ids of a prompt, as tokenized by TRL, with the tools of the environment of this name."""
    with replaced(trainer, {"_batch_environments": [environment]}):
        return tuple(int(token) for token in trainer._tokenize_prompts([prompt])[0][0])


def has_turns(trainer: GRPOTrainer) -> bool:
    """Return whether rollouts may have several turns."""
    return bool(trainer.tools) or trainer.environment_factories is not None


def prompts_tokens(trainer: GRPOTrainer, prompts: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the token ids of the prompts of the batch that is being generated, with the tools of each."""
    return [tuple(map(int, ids)) for ids in trainer._tokenize_prompts(list(prompts))[0]]


def environment_of(trainer: GRPOTrainer, row: Mapping[str, Any]) -> str | None:
    """Return the name of a data row's environment; None where there is only one, or none."""
    several = trainer.environment_factories is not None and None not in trainer.environment_factories
    return row.get("environment") if several else None


def environment_name(trainer: GRPOTrainer, row: int) -> str:
    """Return the class of the environment of a row of the batch, for messages; empty without one."""
    return "" if not trainer.environments else type(trainer.environments[row]).__name__


def tool_schemas(trainer: GRPOTrainer, environment: str | None) -> str:
    """Return the tools that the model has in an environment (None: the only one, or none) as JSON."""
    tools = trainer.tools if trainer.environment_factories is None else trainer._env_tools[environment]
    return json.dumps([get_json_schema(tool) for tool in tools], ensure_ascii=False)


def observed(trainer: GRPOTrainer, row: Inputs, environments: Environments) -> Any:
    """Return a data row's prompt with what its environment observes at a reset with the row, as TRL builds it.

    `environments`: instances by name, of which the first is reset.
    """
    name, prompt = environment_of(trainer, row), row["prompt"]
    pool = environments[name]
    if not pool:
        pool.append(trainer.environment_factories[name]())
    several = None not in trainer.environment_factories
    observation = pool[0].reset(**{key: value for key, value in row.items() if not several or key != "environment"})
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def sampled_and_scored(
    trainer: HookedGRPOTrainer,
    inputs: list[Inputs],
    environments: Environments,
    shown: Callable[[list[Any]], list[Any]] | None = None,
) -> GenerationBatch:
    """Return one rollout per data row, sampled and scored by TRL, also with tools or an environment. The model must be
    in evaluation mode.

    `environments`: instances by name, reused by the next call, separate from those of training. `shown`: what the model
    sees in place of the prompts, with an environment's observation; the environment is reset with the row as it is, and
    the reward functions see the prompts. Nothing is logged, and no pass is made for a loss.
    """
    results: list[GenerationBatch] = []
    isolated: Inputs = {
        "num_generations_eval": 1,
        "num_iterations": 1,
        "beta": 0.0,
        "vllm_importance_sampling_correction": False,
        "_logs": {
            **{key: [] for key in ("prompt", "completion", "advantages", "images")},
            **{key: defaultdict(list) for key in ("rewards", "extra")},
        },
        "_metrics": {**trainer._metrics, "eval": defaultdict(list)},
        "on_generated": lambda batch, generation: results.append(generation),
        "shown": shown,
    }
    if has_turns(trainer):  # those of the round's batch, which its rewards may still be asked of
        of_batch = ("environments", "_batch_environments", "_sync_tool_dicts", "_async_tool_dicts")
        isolated |= {name: vars(trainer).get(name) for name in of_batch}
    if trainer.environment_factories is not None:
        isolated["_environment_pool"] = environments
    no_old_logps = {"steps_per_generation": trainer.args.gradient_accumulation_steps}
    with replaced(trainer, isolated), replaced(trainer.args, no_old_logps):
        trainer._generate_and_score_completions(inputs)
    return results[0]
