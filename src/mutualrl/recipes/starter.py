"""Files of a new project: a pool, a reward function to change, and a README with the commands that come next."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.errors import UsageError
from mutualrl.records import POLICY_NAME
from mutualrl.storage.files import user_path

OWN = "own"  # a reward function that is written beside the pool
BOXED = "boxed"


@dataclass(frozen=True, slots=True)
class Starter:
    """What a new project is made of. `models`: `MODEL` or `NAME=MODEL` each. `data`: the user's own rows, of task
    `dataset`. `reward`: `boxed`, `own`, or an import path. `max_completion_length`: tokens. `bf16`: names of the
    policies that train in bfloat16 on a CPU."""

    models: tuple[str, ...]
    task: str
    data: Path | None
    reward: str
    gpus: int
    max_completion_length: int
    trust_remote_code: bool = False
    bf16: frozenset[str] = frozenset()


def named(models: Sequence[str]) -> dict[str, str]:
    """Return the models by policy name: as given, else made of the last part of the path or hub id.

    Raises UsageError for fewer than two, and for two of one name.
    """
    if len(models) < 2:
        raise UsageError(f"found {len(models)} models, expected two or more; name each with --model MODEL")
    policies: dict[str, str] = {}
    for given in models:
        name, equals, model = given.partition("=")
        if not equals or re.fullmatch(POLICY_NAME, name) is None:  # a path may hold `=`
            name, model = _name_of(given), given
        if name in policies:
            raise UsageError(f"two policies are called {name!r}; give one another name: --model OTHER={model}")
        policies[name] = model
    return policies


def _name_of(model: str) -> str:
    last = model.removeprefix("tiny:").rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]", "-", last).strip("-._") or "policy"


def files(starter: Starter) -> dict[str, str]:
    """Return the contents of the project's files by name."""
    contents = {"pool.yaml": _pool(starter), "README.md": _readme(starter)}
    if starter.reward == OWN:
        contents["reward.py"] = REWARD
    return contents


def _pool(starter: Starter) -> str:
    policies = []
    for name, model in named(starter.models).items():
        keys = [f"name: {_quoted(name)}", f"model: {_quoted(_absolute(model))}"]
        if starter.trust_remote_code:
            keys.append("trust_remote_code: true")
        if name in starter.bf16:
            keys.append("trainer: {bf16: true}")
        policies.append(f"  - {{{', '.join(keys)}}}")
    task = [f"  name: {_quoted(starter.task)}"]
    if starter.data is not None:
        task.append(f"  data: {_quoted(str(starter.data))}")
    if starter.reward != BOXED:
        task.append(f"  reward: {_quoted('reward.py:reward' if starter.reward == OWN else starter.reward)}")
    sizes = ON_GPUS if starter.gpus else ON_CPU
    return POOL.format(
        policies="\n".join(policies),
        task="\n".join(task),
        gpus=starter.gpus,
        tokens=starter.max_completion_length,
        **sizes,
    )


def _quoted(text: str) -> str:
    """Return a text as YAML reads it back, whatever is in it."""
    return json.dumps(text, ensure_ascii=False)


def _absolute(model: str) -> str:
    path = user_path(Path(model))
    return str(path.resolve()) if path.is_dir() else model


def _readme(starter: Starter) -> str:
    names = list(named(starter.models))
    would_it_help, shared, alone = NEXT
    return README.format(
        would_it_help=would_it_help,
        shared=shared,
        alone=alone,
        policies=f"{', '.join(names[:-1])} and {names[-1]}",
        task=starter.task if starter.data is None else starter.data.name,
        reward="\n`reward.py` says what a completion is worth: change it first.\n" if starter.reward == OWN else "",
    )


#: the commands that come next: would sharing help, training with it, training without
NEXT = (
    "mutualrl complementarity --pool pool.yaml --prompts 64 --samples 4",
    "mutualrl train --regime sgt --pool pool.yaml --run-dir runs/sgt",
    "mutualrl train --regime grpo --pool pool.yaml --run-dir runs/grpo",
)
ON_CPU = {"prompts": 16, "generations": 4, "batch": 16, "rate": "1e-5"}
ON_GPUS = {"prompts": 64, "generations": 8, "batch": 8, "rate": "1e-6"}

POOL = """\
# Policies that are trained together: mutualrl train --regime sgt --pool pool.yaml
policies:
{policies}
task:
{task}
hardware: {{gpus: {gpus}}}
round: {{prompts: {prompts}, optimizer_steps: 1}}
run: {{steps: 100, validate_every: 25, validation_limit: 128}}
trainer: # every key of TRL's GRPOConfig
  learning_rate: {rate}
  lr_scheduler_type: cosine
  num_generations: {generations}
  per_device_train_batch_size: {batch}
  max_completion_length: {tokens}
  beta: 1e-3
"""

REWARD = '''\
"""Reward of a completion. TRL calls the function with all completions of a step; columns of the data are keywords."""


def reward(completions, answer, **columns):
    """Return 1 where the last line of a completion holds the answer, else 0.

    Regime sgt takes a reward above 0.8 for a success and one below 0.2 for a failure (success_above, failure_below).
    """
    rewards = []
    for completion, right in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        lines = text.strip().splitlines()
        rewards.append(float(bool(lines) and str(right).strip() in lines[-1]))
    return rewards
'''

README = """\
# {policies}

Trained together on {task}, with [mutualrl](https://pypi.org/project/mutualrl/).
{reward}
Would sharing help them? What each solves, and how often a peer could help:

    {would_it_help}

Train them with sharing (add `--dry-run` to see the recipe and the placement, and to try the reward again):

    {shared}

The same without sharing, which is what a gain is measured against; then `mutualrl compare runs/grpo runs/sgt`:

    {alone}
"""
