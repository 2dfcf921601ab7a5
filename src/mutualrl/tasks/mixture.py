"""Mixture of tasks: the paper's unified training mixture, with one validation per member.

Source: paper, Section "MATH and Commonsense Reasoning with Regime 3". By default, the members are MATH and the six
question-answering sets. A prompt keeps its id from its own task, and is reported under its member's name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mutualrl.errors import UsageError
from mutualrl.records import Prompt
from mutualrl.tasks.base import PAPER_TOKENS, MixtureMember, Split, Task, TaskData, TaskSource, sample_evenly

PAPER = ("math", "arc", "openbookqa", "boolq", "piqa", "hellaswag", "social_i_qa")


class MixtureTask:
    """Several tasks in one, with training prompts in a random order set by the seed."""

    name = "mixture"
    max_new_tokens = PAPER_TOKENS
    takes_data = True
    reads = "its members: " + ", ".join(PAPER)

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks

    def members(self, source: TaskSource) -> dict[str, tuple[Task, MixtureMember]]:
        """Return the tasks of the mixture with their sources: by default the paper's seven, from the mixture's data
        directory, or the hub. Raises UsageError for an unknown task or a nested mixture."""
        requested: Mapping[str, MixtureMember] = source.members or {name: MixtureMember(TaskSource()) for name in PAPER}
        if self.name in requested:
            raise UsageError("a mixture cannot be a member of a mixture; name its members instead")
        members = {}
        for name, member in requested.items():
            if name not in self._tasks:
                expected = ", ".join(sorted(self._tasks))
                raise UsageError(f"task.members: unknown task {name!r}; expected one of: {expected}")
            task = self._tasks[name]
            if reward := getattr(task, "reward", None):
                raise UsageError(
                    f"task.members: {name!r} is rewarded by {', '.join(reward)}, members of a mixture only by the "
                    "boxed answer; train on it separately"
                )
            members[name] = (task, replace(member, source=_inherited(member.source, source, task)))
        return members

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return all members' prompts of a split: mixed by `mix` for training, one member after another for
        validation."""
        members = self.members(source)
        by_task = {name: task.read(split, member.source) for name, (task, member) in members.items()}
        prompts = {name: [replace(p, group=name) for p in data.prompts] for name, data in by_task.items()}
        weights = {name: member.weight for name, (_, member) in members.items()}
        mixed = [p for group in prompts.values() for p in group]
        if split == "train":
            mixed = mix(prompts, weights, random.Random(source.seed))
        return TaskData(
            mixed,
            "; ".join(f"{name}: {data.origin}" for name, data in by_task.items()),
            tuple(line for data in by_task.values() for line in data.dropped),
            held_out=any(data.held_out for data in by_task.values()),
        )


def _inherited(own: TaskSource, mixture: TaskSource, task: Task) -> TaskSource:
    """Return a member's source; keys that it does not set are the mixture's."""
    return replace(
        own,
        data=own.data if own.data is not None or not task.takes_data else mixture.data,
        validation_data=own.validation_data
        if own.validation_data is not None or own.data is not None or not task.takes_data
        else mixture.validation_data,
        seed=mixture.seed,
    )


def mix(
    prompts: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float | None], rng: random.Random
) -> list[Prompt]:
    """Return the training prompts of all members in random order.

    Without weights, every prompt occurs once: members are in proportion to their size. With weights w (default: the
    member's fraction by size), members get n_i = N w_i / sum(w) of the N prompts in total (largest remainders); a
    member with fewer than n_i prompts repeats them, with counts that differ by at most one; a repeated prompt's id ends
    in `~2`, `~3`, ... Raises UsageError if no weight is above 0."""
    if empty := [name for name, group in prompts.items() if not group]:
        raise UsageError(f"task.members.{empty[0]}: no training prompts are left; give it more data")
    total = sum(map(len, prompts.values()))
    fractions: dict[str, float] = {}
    for name, group in prompts.items():
        weight = weights.get(name)
        fractions[name] = len(group) / total if weight is None else weight
    if not sum(fractions.values()) > 0:
        raise UsageError("task.members: every weight is 0; give one of them a weight above 0")
    exact = {name: total * fraction / sum(fractions.values()) for name, fraction in fractions.items()}
    counts = {name: int(value + 1e-9) for name, value in exact.items()}
    for name in sorted(counts, key=lambda name: counts[name] - exact[name])[: total - sum(counts.values())]:
        counts[name] += 1
    mixed: list[Prompt] = []
    for name, group in prompts.items():
        for copy in range(-(-counts[name] // len(group))):
            room = min(len(group), counts[name] - copy * len(group))
            drawn = list(group) if room == len(group) else rng.sample(list(group), room)
            mixed += drawn if copy == 0 else [replace(p, id=f"{p.id}~{copy + 1}") for p in drawn]
    rng.shuffle(mixed)
    return mixed


def sample_evenly_by_task(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """Return at most `limit` prompts of each member, so that every member is validated."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    return [prompt for group in groups.values() for prompt in sample_evenly(group, limit)]
