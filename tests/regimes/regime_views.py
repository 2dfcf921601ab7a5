"""Helpers of the regimes' tests: peers in memory, a learner's view of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mutualrl.records import Rollout
from mutualrl.regimes import RoundView, Trace
from mutualrl.regimes.round import Aligned


class Peer:
    """Peer's round in memory: rows of (prompt, reward, text, ids, trace, ended)."""

    def __init__(self, rows: Sequence[tuple[Any, ...]]) -> None:
        self.rows = [(*row, *(None, None, None, True)[len(row) - 2 :]) for row in rows]

    def column(self, name: str) -> list[Any]:
        """Return a column of the exchange."""
        if name == "rollout":
            return list(range(len(self.rows)))
        at = ("prompt_id", "reward", "y_text", "token_ids", "logprobs", "ended").index(name)
        return [row[at] for row in self.rows]

    def texts(self, rows: Sequence[int]) -> list[str | None]:
        """Return texts of the rows."""
        return [self.rows[i][2] for i in rows]


def same_tokens(trace: Trace, ids: Sequence[int], anchor: str) -> Aligned:
    """Return the alignment of two policies with one tokenizer: a copy."""
    return Aligned(np.array(trace.logprobs, dtype=np.float64), np.ones(len(ids), dtype=np.bool_))


class TextTransfer:
    """Tokenizer layer in memory: `fit` from text to ids, `align` from traces to ids."""

    def __init__(self, fit: Any = None, align: Any = None) -> None:
        self.to_learner_ids = fit or (lambda text, ended: tuple(text.encode()))
        self.align = align or same_tokens

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the bytes as text."""
        return bytes(ids).decode()


def view(own: Sequence[tuple[str, float]], peers: dict[str, Peer] | None = None, **changes: Any) -> RoundView:
    """Return a learner's round; its texts are bytes, its advantages the group's, its lengths 1 unless told."""
    from mutualrl.regimes.advantages import by_prompt, in_rows, pool_advantages, standard_deviation

    ids, rewards = [p for p, _ in own], [r for _, r in own]
    scale = changes.get("scale", "group")
    local = {
        p: pool_advantages(r, r, scale=scale, batch_standard_deviation=standard_deviation(rewards))
        for p, r in by_prompt(ids, rewards).items()
    }
    advantages = changes.pop("advantages", in_rows(ids, local))
    lengths = changes.pop("lengths", [1] * len(ids))
    rollouts = [
        Rollout(p, index, r, True, length=length, advantage=a, token_ids=tuple(b"own"))
        for index, ((p, r), a, length) in enumerate(zip(own, advantages, lengths, strict=True))
    ]
    transfer = TextTransfer(changes.pop("fit", None), changes.pop("align", None))
    defaults: dict[str, Any] = {
        "round": 0,
        "learner": "ada",
        "run_seed": 0,
        "rollouts": rollouts,
        "peers": peers or {},
        "transfer": transfer,
    }
    return RoundView(**{**defaults, **changes})
