"""Files of a new project: a pool, a reward function to edit, and a README with the next commands."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.recipes import yaml_file
from mutualrl.recipes.layers import Layers
from mutualrl.recipes.project import ProjectRequest
from mutualrl.references import POLICY_NAME, name_problem

OWN = "own"  # a reward function written next to the pool
BOXED = "boxed"
OWN_ROWS = "dataset"  # the task of the user's rows


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


def files(project: ProjectRequest, bf16: Collection[str] = ()) -> dict[str, str]:
    """Return the contents of the project's files by file name. `bf16`: names of the policies that train in bfloat16
    on a CPU."""
    contents = {"pool.yaml": _pool(project, bf16), "README.md": _readme(project)}
    if project.reward == OWN:
        contents["reward.py"] = REWARD
    return contents


def _pool(project: ProjectRequest, bf16: Collection[str]) -> str:
    policies = []
    for name, model in named(project.asked.models, project.asked.sources).items():
        keys = [f"name: {_quoted(name)}", f"model: {_quoted(_absolute(model))}"]
        if project.trust_remote_code:
            keys.append("trust_remote_code: true")
        if name in bf16:
            keys.append("trainer: {bf16: true}")
        policies.append(f"  - {{{', '.join(keys)}}}")
    task = [f"  name: {_quoted(project.asked.task or OWN_ROWS)}"]
    if project.asked.data is not None:
        task.append(f"  data: {_quoted(str(project.asked.data))}")
    for key, text in (("template", project.template), ("answer", project.answer_column)):
        if text is not None:
            task.append(f"  {key}: {_quoted(text)}")
    if project.reward not in (None, BOXED):
        task.append(f"  reward: {_quoted('reward.py:reward' if project.reward == OWN else str(project.reward))}")
    sizes: dict[str, object] = {**(ON_GPUS if project.gpus else ON_CPU), "gpus": project.gpus or 0}
    if project.max_completion_length is not None:
        sizes["tokens"] = project.max_completion_length
    sources = [f"  - {{{', '.join(_source_keys(source))}}}" for source in project.asked.sources]
    text = POOL.format(
        policies="\n".join(policies) + ("\nsources:\n" + "\n".join(sources) if sources else ""),
        task="\n".join(task),
        **sizes,
    )
    return _assigned(text, project.asked.assignments) if project.asked.assignments else text


def _assigned(text: str, assignments: Sequence[str]) -> str:
    """Return a pool file with the keys of `--set`; their relative paths are the caller's, not the file's. Raises
    RecipeError as `train --set` does."""
    layers = Layers()
    layers.add(yaml_file.parse_mapping(text, "pool.yaml"), "pool.yaml")
    for assignment in assignments:
        if assignment.startswith(("policies.", "sources.")):
            layers.set(assignment)
        else:
            given = Layers()
            given.set(assignment)
            layers.add_layer(given.value, Path.cwd() / "pool.yaml")
    return f"{text.splitlines()[0]}\n{yaml_file.dump(layers.value)}"


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


def _readme(project: ProjectRequest) -> str:
    names = list(named(project.asked.models, project.asked.sources))
    sources = [source.partition("=")[0] for source in project.asked.sources]
    *first, shared, alone = next_commands(project)
    check = "Would sharing help? What each policy solves, and what a peer or a source could revive:"
    return README.format(
        check=f"{check}\n\n    {first[0]}\n\n" if first else "",
        shared=shared,
        alone=alone,
        policies=" and ".join(filter(None, [", ".join(names[:-1]), names[-1]])),
        beside=f", beside {' and '.join(sources)}" if sources else "",
        task=project.asked.task or OWN_ROWS if project.asked.data is None else project.asked.data.name,
        reward="\n`reward.py` scores a completion: edit it first.\n" if project.reward == OWN else "",
    )


#: the next commands: does sharing help, training with sharing, training without
NEXT = (
    "mutualrl complementarity --pool pool.yaml --prompts 64 --samples 4",
    "mutualrl train --regime sgt --pool pool.yaml --run-dir runs/sgt",
    "mutualrl train --regime grpo --pool pool.yaml --run-dir runs/grpo",
)


def next_commands(project: ProjectRequest) -> tuple[str, ...]:
    """Return the next commands: the first only where there is something to compare before training, other models or
    recorded texts."""
    recorded = all("=recorded:" in source for source in project.asked.sources)
    return NEXT if recorded and (len(project.asked.models) > 1 or project.asked.sources) else NEXT[1:]


ON_CPU = {"prompts": 16, "generations": 4, "batch": 16, "rate": "1e-5", "tokens": 64}
ON_GPUS = {"prompts": 64, "generations": 8, "batch": 8, "rate": "1e-6", "tokens": 512}

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
