"""Interface of a source, as a training round sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from mutualrl.rollouts import SCHEMA, Rollouts


class Source(Protocol):
    """Member of the pool that publishes rollouts and never learns.

    `name`: its namespace in the exchange. `verified`: its rewards are those of the run's own reward functions; if not,
    they are NaN, and each learner computes them in the round.

    A source has texts and rewards, no log-probs. It may have none for a prompt, and no policy waits for it.
    """

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def verified(self) -> bool:
        """Return whether its rewards are the verifier's."""
        ...

    def rollouts(self, round_index: int, prompt_ids: Sequence[str]) -> Rollouts:
        """Return its rollouts on these prompts, the same whenever a round is asked for again."""
        ...


@dataclass(frozen=True)
class StoredSource:
    """Source whose rollouts are all known before training.

    `table`: its rollouts, sorted by prompt; the index of a rollout is the place of its text among the prompt's, ordered
    by the sha256 of the text. `learners`: the policies that read it; None: all.
    """

    name: str
    table: pa.Table
    verified: bool = True
    learners: tuple[str, ...] | None = None
    _rows: dict[str, list[int]] = field(default_factory=dict)

    def rollouts(self, round_index: int, prompt_ids: Sequence[str]) -> Rollouts:
        """Return the rollouts on these prompts, in the order of the prompts' ids."""
        if not self._rows:
            for row, prompt_id in enumerate(self.table["prompt_id"].to_pylist()):
                self._rows.setdefault(prompt_id, []).append(row)
        rows = [row for prompt_id in sorted(set(prompt_ids)) for row in self._rows.get(prompt_id, ())]
        taken = self.table.take(pa.array(rows, pa.int64()))
        number = pa.array(np.full(len(rows), round_index, dtype=np.int64))
        return Rollouts(taken.set_column(taken.column_names.index("round"), SCHEMA.field("round"), number))

    @property
    def prompts(self) -> int:
        """Return the number of prompts with a rollout."""
        return len(self.table["prompt_id"].unique())
