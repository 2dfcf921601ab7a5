"""Rollouts of several models on the same prompts: the input of the diagnostics.

Shapes: rewards_M_P_G[m, p, g] is the reward of rollout g of policy m on unit p; NaN for an unscorable rollout, and for
an unused slot of a policy with fewer rollouts (`present_M_P_G` distinguishes them). A unit is a prompt in a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mutualrl.errors import DataError, UsageError
from mutualrl.tasks.prompting import Content

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

#: limit of models x units x rollouts: the arrays are dense
MOST_CELLS = 50_000_000


class NoCommonPromptError(DataError):
    """No prompt was answered by all models: they cannot be compared."""


@dataclass(frozen=True, eq=False)
class ModelRollouts:
    """Rollouts by policy, unit and place in their group.

    `rounds`, `prompt_ids`, `tasks`: of each unit, (P,). `rows_M_P_G`: rows of `table`, -1 for none. `contents`: the
    prompts' contents, by prompt id. `left_out`: the number of units that some policy did not answer.
    """

    policies: tuple[str, ...]
    rounds: Ints
    prompt_ids: tuple[str, ...]
    tasks: tuple[str, ...]
    rewards_M_P_G: Floats
    rows_M_P_G: Ints
    table: pa.Table
    origin: str
    left_out: int = 0
    contents: Mapping[str, Content] = field(default_factory=dict)

    @property
    def present_M_P_G(self) -> Bools:
        """Return the mask of existing rollouts."""
        present: Bools = self.rows_M_P_G >= 0
        return present

    def peers_of(self, learner: int) -> list[int]:
        """Return the indices of the other policies."""
        return [m for m in range(len(self.policies)) if m != learner]

    def peer_rewards(self, learner: int) -> Floats:
        """Return all peers' rewards of each unit, concatenated in the order of the peers' names, shape (P, H)."""
        order = sorted(self.peers_of(learner), key=lambda m: self.policies[m])
        rewards: Floats = np.concatenate([self.rewards_M_P_G[m] for m in order], axis=1)
        return rewards

    def has(self, column: str) -> bool:
        """Return whether the table has a column with at least one value."""
        return column in self.table.column_names and self.table.column(column).null_count < len(self.table)

    @property
    def has_texts(self) -> bool:
        """Return whether responses are recorded, as text or as sampled ids."""
        return self.has("y_text") or self.has("token_ids")

    def ended(self, policy: int, unit: int, place: int) -> bool:
        """Return whether a response was not truncated; true if not recorded."""
        return bool(self.cell("ended", policy, unit, place)) if self.has("ended") else True

    def cell(self, column: str, policy: int, unit: int, place: int) -> Any:
        """Return one value of the table."""
        return self.table.column(column)[int(self.rows_M_P_G[policy, unit, place])].as_py()


def to_arrays(
    table: pa.Table, origin: str, contents: Mapping[str, Content] | None = None, more: str = ""
) -> ModelRollouts:
    """Arrange a table of rollouts as arrays. Units that some policy did not answer are left out and counted.

    `more`: advice for the message about a single policy. Raises UsageError for fewer than two policies, DataError for a
    duplicate rollout and when no unit was answered by all."""
    table = table.combine_chunks()
    policies, m = _codes(table.column("policy"))
    if len(policies) < 2:
        raise UsageError(f"{origin}: rollouts of one model ({policies[0]!r}); a pool of two or more is needed{more}")
    names, prompt = _codes(table.column("prompt_id"))
    rounds = table.column("round").to_numpy().astype(np.int64)
    keys, unit = np.unique(np.stack([rounds, prompt]), axis=1, return_inverse=True)
    unit = unit.reshape(-1)
    rollout = table.column("rollout").to_numpy()
    order = np.lexsort((rollout, unit, m))
    same_group = np.zeros(len(order), dtype=bool)
    same_group[1:] = (m[order][1:] == m[order][:-1]) & (unit[order][1:] == unit[order][:-1])
    duplicate = same_group.copy()
    duplicate[1:] &= rollout[order][1:] == rollout[order][:-1]
    if duplicate.any():
        row = int(order[np.flatnonzero(duplicate)[0]])
        where = f"{table['file'][row]}, row {table['line'][row]}" if "file" in table.column_names else origin
        raise DataError(
            f"{where}: policy {policies[m[row]]!r} has rollout {int(rollout[row])} of prompt {names[prompt[row]]!r} "
            f"twice (round {int(rounds[row])})"
        )
    starts = np.where(~same_group, np.arange(len(order)), 0)
    place = np.arange(len(order)) - np.maximum.accumulate(starts)
    if len(policies) * keys.shape[1] * (int(place.max()) + 1) > MOST_CELLS:
        raise DataError(
            f"{origin}: one prompt has {int(place.max()) + 1:,} rollouts of a model; with {keys.shape[1]:,} prompts, "
            "such unequal groups do not fit into memory: shorten the largest"
        )
    rows = np.full((len(policies), keys.shape[1], int(place.max()) + 1), -1, dtype=np.int64)
    rows[m[order], unit[order], place] = order
    complete = (rows[:, :, 0] >= 0).all(axis=0)
    if not complete.any():
        raise NoCommonPromptError(f"{origin}: no prompt was answered by all of {', '.join(map(repr, policies))}")
    rows = rows[:, complete]
    rewards = np.where(rows >= 0, table.column("reward").to_numpy()[rows], np.nan)
    ids = tuple(names[code] for code in keys[1, complete])
    return ModelRollouts(
        policies=tuple(policies),
        rounds=keys[0, complete],
        prompt_ids=ids,
        tasks=_tasks(table, rows[0, :, 0], ids),
        rewards_M_P_G=rewards,
        rows_M_P_G=rows,
        table=table,
        origin=origin,
        left_out=int((~complete).sum()),
        contents={} if contents is None else contents,
    )


def _codes(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """Return the distinct strings of a column, sorted, and each row's index among them."""
    encoded = column.combine_chunks().dictionary_encode()
    values = encoded.dictionary.to_pylist()
    order = sorted(range(len(values)), key=lambda i: values[i])
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values))
    return [values[i] for i in order], rank[encoded.indices.to_numpy()]


def _tasks(table: pa.Table, rows: Ints, ids: Sequence[str]) -> tuple[str, ...]:
    """Return the task of each unit: from the table, else from its prompt id (task/split/row/hash), else `all`."""
    if "task" in table.column_names:
        tasks = table.column("task").take(pa.array(rows)).to_pylist()
        return tuple(str(task) if task is not None else _task_of(i) for task, i in zip(tasks, ids, strict=True))
    return tuple(_task_of(i) for i in ids)


def _task_of(prompt_id: str) -> str:
    parts = prompt_id.split("/")
    return parts[0] if len(parts) >= 4 and parts[1] in ("train", "validation") else "all"
