"""Regimes decode only the columns and texts of a peer's shard that they use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mutualrl.records import Rollout
from mutualrl.regimes import get_regime
from mutualrl.see import Exchange, Shard
from mutualrl.trajectory import Trajectory
from regime_views import view

OWN = [("p0", 0.0), ("p0", 0.0), ("p1", 0.0), ("p1", 1.0)]


def peer(root: Path) -> Shard:
    rows = [
        Rollout(
            prompt,
            n,
            1.0,
            True,
            prompt="?",
            trajectory=Trajectory.of_text(f"{prompt}-{n}"),
            token_ids=(1, 2),
            logprobs=(-0.5, -0.5),
        )
        for prompt in ("p0", "p1")
        for n in (0, 1)
    ]
    Exchange(root, "bob", "run").publish(0, rows, 0)
    shard = Exchange(root, "ada", "run").read("bob", 0)
    assert shard is not None
    return shard


@pytest.mark.parametrize(
    ("regime", "allowed"),
    [
        ("xgrpo", {"prompt_id", "reward"}),
        ("sgt", {"prompt_id", "reward", "index", "ended"}),
        ("prp", {"prompt_id", "reward", "index", "ended", "trajectory", "token_ids", "logprobs"}),
    ],
)
def test_only_used_columns_and_texts_are_decoded(
    tmp_path: Path, regime: str, allowed: set[str], monkeypatch: Any
) -> None:
    shard = peer(tmp_path)
    texts: list[int] = []
    read = Shard.trajectories

    def record_texts(self: Shard, rows: list[int] | None = None) -> Any:
        texts.extend(range(len(self)) if rows is None else rows)
        return read(self, rows)

    monkeypatch.setattr(Shard, "trajectories", record_texts)
    result = get_regime(regime)().plan(view(OWN, {"bob": shard}))  # type: ignore[dict-item]
    assert set(shard._lists) <= allowed
    if regime == "sgt":
        assert [row.prompt_id for row in result.rows] == ["p0"]
        assert len(texts) >= 1
        assert {shard.prompt_ids[row] for row in texts} == {"p0"}  # only the gated prompt's
