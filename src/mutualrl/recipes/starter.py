"""Files of a new project: a pool, a reward function to edit, and a README with the next commands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.records import POLICY_NAME, name_problem

OWN = "own"  # a reward function written next to the pool
BOXED = "boxed"


@dataclass(frozen=True, slots=True)
class Starter:
    """Options of a new project. `models`: `MODEL` or `NAME=MODEL` each. `data`: the user's rows, for task `dataset`.
    `template`, `answer`: how their prompts are built, and the field of the answer. `reward`: `boxed`, `own`, or an
    import path. `sources`: `NAME=KIND:REFERENCE` each. `max_completion_length`: in tokens. `bf16`: names of the
    policies that train in bfloat16 on a CPU."""

    models: tuple[str, ...]
    task: str
    data: Path | None
    reward: str
    gpus: int
    max_completion_length: int
    trust_remote_code: bool = False
    bf16: frozenset[str] = frozenset()
    template: str | None = None
    answer: str | None = None
    sources: tuple[str, ...] = ()


def named(models: Sequence[str], sources: Sequence[str] = ()) -> dict[str, str]:
    """Return the models by policy name: the given name, else one derived from the last part of the path or hub id.

    Raises UsageError for a model with nobody to learn from, or for duplicate names.
    """
    if len(models) < 2 and not (models and sources):
        raise UsageError(
            f"found {len(models)} models and {len(sources)} sources, expected two models or more, or one and a source: "
            "--model MODEL --model MODEL, or --model MODEL --source NAME=recorded:FILE"
        )
    policies: dict[str, str] = {}
    for argument in models:
        name, equals, model = argument.partition("=")
        if not equals or re.fullmatch(POLICY_NAME, name) is None:  # a path may contain `=`
            name, model = _name_of(argument), argument
        if name in policies:
            raise UsageError(f"two policies are named {name!r}; rename one: --model OTHER={model}")
        if (problem := name_problem(name)) is not None:
            raise UsageError(f"a policy cannot be named {name!r}: {problem}; name it with --model NAME={model}")
        policies[name] = model
    return policies


def _name_of(model: str) -> str:
    last = model.removeprefix("tiny:").rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]", "-", last).strip("-._") or "policy"


def files(starter: Starter) -> dict[str, str]:
    """Return the contents of the project's files by file name."""
    contents = {"pool.yaml": _pool(starter), "README.md": _readme(starter)}
    if starter.reward == OWN:
        contents["reward.py"] = REWARD
    return contents


def _pool(starter: Starter) -> str:
    policies = []
    for name, model in named(starter.models, starter.sources).items():
        keys = [f"name: {_quoted(name)}", f"model: {_quoted(_absolute(model))}"]
        if starter.trust_remote_code:
            keys.append("trust_remote_code: true")
        if name in starter.bf16:
            keys.append("trainer: {bf16: true}")
        policies.append(f"  - {{{', '.join(keys)}}}")
    task = [f"  name: {_quoted(starter.task)}"]
    if starter.data is not None:
        task.append(f"  data: {_quoted(str(starter.data))}")
    for key, text in (("template", starter.template), ("answer", starter.answer)):
        if text is not None:
            task.append(f"  {key}: {_quoted(text)}")
    if starter.reward != BOXED:
        task.append(f"  reward: {_quoted('reward.py:reward' if starter.reward == OWN else starter.reward)}")
    sizes = ON_GPUS if starter.gpus else ON_CPU
    sources = [f"  - {{{', '.join(_source_keys(source))}}}" for source in starter.sources]
    return POOL.format(
        policies="\n".join(policies) + ("\nsources:\n" + "\n".join(sources) if sources else ""),
        task="\n".join(task),
        gpus=starter.gpus,
        tokens=starter.max_completion_length,
        **sizes,
    )


def _source_keys(source: str) -> list[str]:
    """Return the keys of a source given as `NAME=KIND:REFERENCE`; a file beside the caller as an absolute path."""
    name, _, rest = source.partition("=")
    kind, _, reference = rest.partition(":")
    path = user_path(Path(reference))
    known = path.exists() and not reference.startswith(("tiny:", "hub:")) and reference != "task"
    return [f"name: {_quoted(name)}", f"{kind}: {_quoted(str(path.resolve()) if known else reference)}"]


def _quoted(text: str) -> str:
    """Return a text as a quoted YAML string."""
    return json.dumps(text, ensure_ascii=False)


def _absolute(model: str) -> str:
    path = user_path(Path(model))
    return str(path.resolve()) if path.is_dir() else model


def _readme(starter: Starter) -> str:
    names = list(named(starter.models, starter.sources))
    sources = [source.partition("=")[0] for source in starter.sources]
    *first, shared, alone = next_commands(starter)
    check = "Would sharing help? What each policy solves, and what a peer or a source could revive:"
    return README.format(
        check=f"{check}\n\n    {first[0]}\n\n" if first else "",
        shared=shared,
        alone=alone,
        policies=" and ".join(filter(None, [", ".join(names[:-1]), names[-1]])),
        beside=f", beside {' and '.join(sources)}" if sources else "",
        task=starter.task if starter.data is None else starter.data.name,
        reward="\n`reward.py` scores a completion: edit it first.\n" if starter.reward == OWN else "",
    )


#: the next commands: does sharing help, training with sharing, training without
NEXT = (
    "mutualrl complementarity --pool pool.yaml --prompts 64 --samples 4",
    "mutualrl train --regime sgt --pool pool.yaml --run-dir runs/sgt",
    "mutualrl train --regime grpo --pool pool.yaml --run-dir runs/grpo",
)


def next_commands(starter: Starter) -> tuple[str, ...]:
    """Return the next commands: the first only where there is something to compare before training, other models or
    recorded texts."""
    recorded = all("=recorded:" in source for source in starter.sources)
    return NEXT if recorded and (len(starter.models) > 1 or starter.sources) else NEXT[1:]


ON_CPU = {"prompts": 16, "generations": 4, "batch": 16, "rate": "1e-5"}
ON_GPUS = {"prompts": 64, "generations": 8, "batch": 8, "rate": "1e-6"}

POOL = """\
# Policies to train together: mutualrl train --regime sgt --pool pool.yaml
policies:
{policies}
task:
{task}
hardware: {{gpus: {gpus}}}
round: {{prompts: {prompts}, optimizer_steps: 1}}
run: {{steps: 100, validate_every: 25, validation_limit: 128}}
trainer: # any key of TRL's GRPOConfig
  learning_rate: {rate}
  lr_scheduler_type: cosine
  num_generations: {generations}
  per_device_train_batch_size: {batch}
  max_completion_length: {tokens}
  beta: 1e-3
"""

REWARD = '''\
"""Reward function. TRL calls it with all completions of a step; columns of the data are keyword arguments."""

import re

NUMBER = re.compile(r"-?\\d[\\d,]*(?:\\.\\d+)?")


def value(text):
    """Return the last number in a text, or None."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def last_line(text):
    """Return the last line of a text, without "####" before it."""
    lines = text.strip().splitlines()
    return lines[-1].strip("# .") if lines else ""


def is_right(text, expected):
    """Return whether the last number is that of the expected answer's last line, or, in words, the last lines agree."""
    final = last_line(expected)
    if NUMBER.fullmatch(final):
        return value(text) == value(final)
    return bool(final) and last_line(text).casefold() == final.casefold()


def reward(completions, answer, **columns):
    """Return 1 for each completion whose final answer is right, else 0.

    Compare values, not texts: 15 contains 5, but is not 5, and a false success would be taught to the peers. Regime sgt
    treats a reward above 0.8 as a success and one below 0.2 as a failure (success_above, failure_below).
    """
    rewards = []
    for completion, expected in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        rewards.append(float(is_right(text, str(expected).strip())))
    return rewards
'''

README = """\
# {policies}

Trained on {task}{beside}, with [mutualrl](https://pypi.org/project/mutualrl/).
{reward}
{check}Train with sharing (add `--dry-run` to check the recipe, the placement and the reward first):

    {shared}

Train without sharing, as the baseline; then `mutualrl compare runs/grpo runs/sgt`:

    {alone}
"""
