"""Dead prompts: those on which every rollout of a model fails, from which GRPO learns nothing.

A prompt counts by the last group of rollouts that a model has of it: in a dump of a training run, by its last step with
this prompt."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from mutualrl.console.markdown import name, table
from mutualrl.console.plots import Draw
from mutualrl.diagnostics.drawing import legend, short
from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.rollout_reader import last_rounds, reward_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 50  # characters per bar


@dataclass(frozen=True, slots=True)
class DeadRow:
    """One model. Its `prompts` are dead (all rollouts fail), solved (all succeed), unscored (none has a reward), or
    between; `rollouts`: the fewest and the most per prompt; `revived`: dead prompts on which another model has a
    success, None if no other model has any of its prompts."""

    model: str
    prompts: int
    rollouts: tuple[int, int]
    dead: int
    between: int
    solved: int
    unscored: int
    revived: int | None


@dataclass(frozen=True, slots=True)
class DeadPrompts:
    """Dead prompts of each model."""

    dead_prompts: list[DeadRow]


def dead_prompts(rollouts: pa.Table, thresholds: Thresholds) -> DeadPrompts:
    """Return the row of each model. A rollout fails with a reward below the failure threshold and succeeds above the
    success threshold; NaN does neither."""
    groups = last_groups(rollouts)
    solvers: dict[str, set[str]] = {}
    for model, by_prompt in groups.items():
        success = thresholds.of(model).success_above
        for prompt_id, rewards in by_prompt.items():
            if any(reward > success for reward in rewards):
                solvers.setdefault(prompt_id, set()).add(model)
    models_with = Counter(prompt_id for by_prompt in groups.values() for prompt_id in by_prompt)
    rows = []
    for model in sorted(groups):
        compared = any(models_with[prompt_id] > 1 for prompt_id in groups[model])
        rows.append(_row(model, groups[model], solvers if compared else None, thresholds))
    return DeadPrompts(rows)


def last_groups(rollouts: pa.Table) -> dict[str, dict[str, list[float]]]:
    """Return the rewards of each model's last group of each prompt."""
    last = last_rounds(rollouts)
    groups: dict[str, dict[str, list[float]]] = {}
    columns = (last[key].to_pylist() for key in ("policy", "prompt_id", "reward"))
    for model, prompt_id, reward in zip(*columns, strict=True):
        groups.setdefault(model, {}).setdefault(prompt_id, []).append(reward)
    return groups


def _row(
    model: str, groups: Mapping[str, Sequence[float]], solvers: Mapping[str, set[str]] | None, rule: Thresholds
) -> DeadRow:
    """Return the row of a model. `solvers`: models with a success by prompt, None if no other model has any of its
    prompts."""
    own = rule.of(model)
    dead = [key for key, rewards in groups.items() if all(reward < own.failure_below for reward in rewards)]
    solved = sum(all(reward > own.success_above for reward in rewards) for rewards in groups.values())
    unscored = sum(all(math.isnan(reward) for reward in rewards) for rewards in groups.values())
    sizes = list(map(len, groups.values()))
    return DeadRow(
        model,
        len(groups),
        (min(sizes), max(sizes)),
        len(dead),
        len(groups) - len(dead) - solved - unscored,
        solved,
        unscored,
        None if solvers is None else sum(bool(solvers.get(key)) for key in dead),
    )


def next_step(path: Path, reward: str | None) -> str:
    """Return the command that says what recorded texts would revive, with the reward of a file of rollouts."""
    column = reward_column(path, reward)
    words = ["mutualrl", "complementarity", "--rollouts", str(path)]
    words += ["--reward", reward] if reward is not None else []
    words += ["--source", "NAME=recorded:FILE", "--task", "dataset", "--data", "ROWS"]
    if column not in (None, "reward", "score", "boxed_reward"):  # a function of the user's, whose verdict counts there
        words += ["--set", f"task.reward=FILE.py:{column}"]
    return shlex.join(words)


def markdown(result: DeadPrompts, *, command: str) -> str:
    """Return a bar per model, the table, and what to add: by `command`, empty if there are recorded texts."""
    rows = result.dead_prompts
    widest = max(len(short(row.model)) for row in rows)
    bars = "\n".join(f"    {short(row.model):<{widest}}  {bar(row)}" for row in rows)
    head = ["model", "prompts", "rollouts each", "dead", "between", "solved", "no reward", "revived by another model"]
    parts = [
        f"{bars}\n    {'':<{widest}}  █ dead: every rollout fails   ▒ between   ░ solved: every rollout succeeds",
        table("Prompts by what the model's last rollouts say of them", head, [_cells(row) for row in rows]),
    ]
    if len(rows) == 1 and command and rows[0].dead:
        parts.append(
            f"Every rollout fails on {rows[0].dead} of {rows[0].prompts} prompts; where all rewards are equal, GRPO "
            "learns nothing. What would revive them: another model (--rollouts of it on the same prompts), or recorded "
            f"texts: {command}"
        )
    return "\n\n".join(parts)


def bar(row: DeadRow) -> str:
    """Return the fractions of dead, between and solved prompts as WIDTH characters."""
    dead = math.ceil(WIDTH * row.dead / row.prompts)
    solved = min(WIDTH - dead, math.ceil(WIDTH * row.solved / row.prompts))
    return "█" * dead + "▒" * (WIDTH - dead - solved) + "░" * solved


def _cells(row: DeadRow) -> list[str]:
    few, many = row.rollouts
    shares = [f"{count} ({count / row.prompts:.0%})" for count in (row.dead, row.between, row.solved, row.unscored)]
    revived = "" if row.revived is None else f"{row.revived} of {row.dead}"
    return [name(row.model), str(row.prompts), str(few) if few == many else f"{few} to {many}", *shares, revived]


def figures(result: DeadPrompts) -> dict[str, tuple[tuple[float, float], Draw]]:
    """Return the figure: a stacked bar per model."""
    height = 1.4 + 0.4 * len(result.dead_prompts)
    return {"dead_prompts": ((6.4, height), lambda figure: _draw(figure.subplots(), result.dead_prompts))}


def _draw(axis: Axes, rows: Sequence[DeadRow]) -> None:
    models = [short(row.model) for row in rows]
    revived = [row.revived or 0 for row in rows]
    parts = [
        ("dead", [row.dead - back for row, back in zip(rows, revived, strict=True)], "#c8454f"),
        ("dead, another model succeeds", revived, "#d1711f"),
        ("between", [row.between for row in rows], "#2a9d6f"),
        ("solved", [row.solved for row in rows], "#8c8c8c"),
    ]
    left = [0] * len(rows)
    for label, counts, colour in parts:
        if any(counts):
            axis.barh(range(len(rows)), counts, left=left, color=colour, label=label)
            left = [begin + count for begin, count in zip(left, counts, strict=True)]
    axis.set_yticks(range(len(rows)), models, parse_math=False)
    axis.set(xlabel="prompts", title="Prompts by the model's last rollouts")
    axis.invert_yaxis()
    legend(axis, fontsize=8)
