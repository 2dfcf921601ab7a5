"""Rollouts with tools and environments: all that needs private members of TRL for them (see `trl_compat`)."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import GenerationConfig
from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from mutualrl.adapter.trl_compat import (
    GenerationBatch,
    HookedGRPOTrainer,
    Inputs,
    Replay,
    replaced,
    tokenizer_of,
)
from mutualrl.engines.sampling import Sampling
from mutualrl.tasks.trajectories import of_completion
from mutualrl.tasks.turns import methods_of

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


def rendering_settings(trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the arguments with which TRL renders conversations: its own form of the template, where that changes
    earlier turns, and the user's arguments."""
    template = {} if trainer.chat_template is None else {"chat_template": trainer.chat_template}
    return {**template, **trainer.chat_template_kwargs}


def tool_schemas(trainer: GRPOTrainer, environment: str | None) -> str:
    """Return the tools that the model has in an environment (None: the only one, or none) as JSON."""
    tools = trainer.tools if trainer.environment_factories is None else trainer._env_tools[environment]
    return json.dumps([get_json_schema(tool) for tool in tools], ensure_ascii=False)


def observed(trainer: GRPOTrainer, row: Inputs, environments: Environments, place: int = 0) -> Any:
    """Return a data row's prompt with what its environment observes at a reset with the row, as TRL builds it.

    `environments`: instances by name, of which that at `place` is reset.
    """
    name, prompt = environment_of(trainer, row), row["prompt"]
    pool = environments[name]
    while len(pool) <= place:
        pool.append(trainer.environment_factories[name]())
    observation = pool[place].reset(**reset_arguments(trainer, row))
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


class RecordedTurn(NamedTuple):
    """Turn of a run: the token ids of the model's message, with its end token, and the results that followed."""

    ids: list[int]
    results: list[str]


class _Recorded:
    """What TRL's loop samples while a run is acted again: the run's next message, as long as results are the run's.
    `said`: the messages so far, to which TRL appends."""

    def __init__(self, turns: Sequence[RecordedTurn], said: list[Inputs]) -> None:
        self.turns, self.said = list(turns), said
        self.place = 0
        self.diverged = False

    def __call__(self, *_: object, **__: object) -> tuple[list[list[int]], None]:
        results = sorted(each.text for each in of_completion(self.last_results()))
        self.diverged = results != sorted(self.turns[self.place].results)  # TRL appends asynchronous ones last
        self.place += 1
        ended = self.diverged or self.place == len(self.turns)
        return [[] if ended else list(self.turns[self.place].ids)], None

    def last_results(self) -> list[Inputs]:
        """Return the results that TRL appended last."""
        begin = max(place for place, message in enumerate(self.said) if message["role"] != "tool") + 1
        return self.said[begin:]


def act_again(
    trainer: HookedGRPOTrainer, row: int, prompt_ids: Sequence[int], turns: Sequence[RecordedTurn], most: int
) -> Replay:
    """Return what TRL's own loop makes of a run's turns in the environment of a row of the batch: it parses each
    message, calls its tools and appends their results. The first result that is not the run's is the last.

    `most`: maximum number of tokens of turns and results. The environment has acted even if there is no room.
    """
    environments = trainer.environment_factories is not None
    name = trainer._batch_environments[row] if environments else None
    tools = trainer._env_tools[name] if environments else trainer.tools
    first = list(turns[0].ids)
    said: list[Inputs] = [parse_response(tokenizer_of(trainer), first, prefix=list(prompt_ids), tools=tools)]
    recorded = _Recorded(turns, said)
    alone: Inputs = {
        "_generate_single_turn": recorded,
        "max_tool_calling_iterations": len(turns),
        "max_completion_length": most,
        "_sync_tool_dicts": [trainer._sync_tool_dicts[row]],
        "_async_tool_dicts": [trainer._async_tool_dicts[row]],
    }
    if environments:
        alone["_batch_environments"] = [name]
    with replaced(trainer, alone):
        acted: Any = trainer._tool_call_loop([[]], [list(prompt_ids)], [first], [said], None, None, {})
    _, (messages,), (ids,), *_ = acted
    if messages[-1]["role"] != "tool":
        return Replay(too_long=True)
    given = tuple(message._replace(sampled=False) for message in of_completion(messages))
    return Replay(given, tuple(ids), recorded.diverged)


@contextmanager
def acting(trainer: GRPOTrainer, inputs: Sequence[Inputs], environments: Environments) -> Iterator[list[Any]]:
    """Make data rows TRL's batch, each with an environment that was reset with it; yield their prompts with what was
    observed. `environments`: instances by name, reused by the next call."""
    names = [environment_of(trainer, row) for row in inputs]
    places = [names[:row].count(name) for row, name in enumerate(names)]
    prompts = [observed(trainer, row, environments, place) for row, place in zip(inputs, places, strict=True)]
    own = [environments[name][place] for name, place in zip(names, places, strict=True)]
    synchronous, asynchronous = [], []
    for environment in own:
        tools = {tool.__name__: tool for tool in [*trainer._standalone_tools, *methods_of(environment)]}
        coroutines = {name: tool for name, tool in tools.items() if inspect.iscoroutinefunction(tool)}
        synchronous.append({name: tool for name, tool in tools.items() if name not in coroutines})
        asynchronous.append(coroutines)
    of_batch = {
        "environments": own,
        "_batch_environments": names,
        "_sync_tool_dicts": synchronous,
        "_async_tool_dicts": asynchronous,
    }
    with replaced(trainer, of_batch):
        yield prompts


def reset_again(trainer: GRPOTrainer, row: int, data: Inputs) -> None:
    """Reset the environment of a row of the batch with its data row, as it was before turns were acted in it."""
    if trainer.environments is not None:
        trainer.environments[row].reset(**reset_arguments(trainer, data))


def reset_arguments(trainer: GRPOTrainer, row: Inputs) -> Inputs:
    """Return the columns that TRL gives an environment's reset."""
    several = None not in trainer.environment_factories
    return {key: value for key, value in row.items() if not several or key != "environment"}


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
